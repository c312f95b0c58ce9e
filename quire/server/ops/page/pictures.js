// Pictures that go with the next message: chosen, pasted or dropped, shown small, and sent as data URLs.

const MAX_PICTURES = 8;
const MAX_BYTES = 12 << 20; // of a file: a request has a limit of its own, which the server tells

export class Pictures {
  // `onNote(text)`: says why a file was not taken; an empty text takes that back.
  constructor(onNote) {
    this.#onNote = onNote;
    this.#tray = document.getElementById("pictures");
    this.#listen();
  }

  #onNote;
  #tray;
  #urls = [];
  #numReads = 0;

  get isEmpty() {
    return this.#urls.length === 0;
  }

  get isReading() {
    return this.#numReads > 0;
  }

  // The data URLs of all pictures, which then belong to a message.
  take() {
    const taken = this.#urls;
    this.clear();
    return taken;
  }

  clear() {
    this.#urls = [];
    this.#show();
    this.#onNote("");
  }

  #listen() {
    const input = document.getElementById("picture-file");
    document.getElementById("picture-add").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.#add(input.files);
      input.value = ""; // the same file may be chosen again
    });
    document.getElementById("prompt").addEventListener("paste", (event) => {
      if (event.clipboardData?.files.length && this.#add(event.clipboardData.files)) event.preventDefault();
    });
    const chat = document.querySelector(".chat");
    const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    chat.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      chat.classList.add("dropping");
    });
    chat.addEventListener("dragleave", (event) => {
      if (!chat.contains(event.relatedTarget)) chat.classList.remove("dropping");
    });
    chat.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      chat.classList.remove("dropping");
      this.#add(event.dataTransfer.files);
    });
  }

  // Whether any of the files is a picture.
  #add(files) {
    const pictures = [...files].filter((file) => file.type.startsWith("image/"));
    this.#onNote("");
    if (pictures.length < files.length) this.#onNote("Only pictures can be sent.");
    for (const file of pictures) this.#read(file);
    return pictures.length > 0;
  }

  async #read(file) {
    if (file.size > MAX_BYTES) {
      this.#onNote(`${file.name} has ${Math.ceil(file.size / (1 << 20))} MiB; at most ${MAX_BYTES >> 20} can be sent.`);
      return;
    }
    if (this.#urls.length + this.#numReads >= MAX_PICTURES) {
      this.#onNote(`At most ${MAX_PICTURES} pictures go with a message.`);
      return;
    }
    this.#numReads += 1;
    try {
      this.#urls.push(await dataUrl(file));
    } catch {
      this.#onNote(`${file.name} could not be read.`);
    }
    this.#numReads -= 1;
    this.#show();
  }

  #show() {
    this.#tray.hidden = this.#urls.length === 0;
    this.#tray.replaceChildren(...this.#urls.map((url, place) => {
      const item = document.createElement("li");
      const remove = document.createElement("button");
      remove.type = "button";
      remove.textContent = "×";
      remove.setAttribute("aria-label", `Remove picture ${place + 1}`);
      remove.addEventListener("click", () => {
        this.#urls.splice(place, 1);
        this.#show();
      });
      item.append(thumbnail(url, `Picture ${place + 1}`), remove);
      return item;
    }));
  }
}

export function thumbnail(url, description) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = description;
  image.className = "thumbnail";
  return image;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
