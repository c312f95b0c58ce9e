"""The wording of the conversations that the model is trained on.

Owns the special tokens, the chat format and the phrases of the requests. Knows nothing of corpora
or of tensors.
"""

import random

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

TOOLS_INTRODUCTION = "Tools:\n"
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\nTools:' -}}"
    "{%- for tool in tools -%}"
    "{%- set it = tool.function if tool.function is defined else tool -%}"
    "{{- '\\n' + it.name + '(' -}}"
    "{%- if it.parameters and it.parameters.properties -%}"
    "{{- it.parameters.properties.keys() | join(', ') -}}"
    "{%- endif -%}"
    "{{- '): ' + (it.description or '') -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set it = call.function if call.function is defined else call -%}"
    '{{- \'<tool_call>\\n{"name": "\' + it.name + \'", "arguments": \' -}}'
    "{%- if it.arguments is string -%}{{- it.arguments -}}{%- else -%}{{- it.arguments | tojson -}}"
    "{%- endif -%}{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

_TALE_REQUESTS = (
    ("Tell me a story about {}.", 12),
    ("Tell me a short story about {}.", 3),
    ("Tell me a little story about {}.", 2),
    ("Tell me a bedtime story about {}.", 2),
    ("Tell me a tale about {}.", 1),
    ("Tell me about {}.", 1),
    ("Can you tell me a story about {}?", 2),
    ("Could you tell me a story about {}, please?", 1),
    ("Please tell me a story about {}.", 2),
    ("Write a story about {}.", 4),
    ("Write a short story about {}.", 3),
    ("Write me a story about {}", 1),
    ("tell me a story about {}", 3),
    ("I would like to hear a story about {}.", 1),
    ("I want a story about {}!", 1),
    ("A story about {}, please.", 2),
    ("Do you know a story about {}?", 1),
    ("Once upon a time there was {}. What happened?", 1),
    ("{}", 1),
)
_KIND_REQUESTS = {
    "fable": (
        "Tell me a fable about {}.",
        "Write a fable about {}.",
        "Do you know a fable about {}?",
    ),
    "fairy tale": ("Tell me a fairy tale about {}.", "Write a fairy tale about {}."),
    "children": ("Tell me a story for children about {}.", "Tell me a simple story about {}."),
}
_OLD_BOOK_REQUESTS = (
    "Tell me an old tale about {}.",
    "Tell me a story from an old book about {}.",
    "Tell me a long story about {}.",
    "Read to me about {}.",
    "Tell me a folk tale about {}.",
    "Do you know an old story about {}?",
)
_TOPICLESS_REQUESTS = (
    "Tell me a story.",
    "Tell me a story!",
    "tell me a story",
    "Tell me a bedtime story.",
    "Can you tell me a story?",
    "Write a short story.",
    "Hello! Tell me a story, please.",
)
_SCENE_REQUESTS = (
    "Tell me a part of a story with {} in it.",
    "Tell me a part of a story about {}.",
    "Write a scene with {} in it.",
    "Write a scene from a book about {}.",
    "Go on with the story of {}.",
    "Tell me more about {}.",
    "What happened next to {}?",
)
_WITH_REQUESTS = (
    "Tell me a story with {}.",
    "Write a story that has {} in it.",
    "Tell me a short story with {} in it.",
    "I want a story in which there is {}.",
    "Make up a story: {}.",
    "Can you write a story with {}?",
)
_FOLLOW_UPS = (
    "Another one, about {}.",
    "Now tell me one about {}.",
    "Tell me another story, about {}.",
)
_SYSTEM_PROMPTS = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell stories to children.",
    "You are a kind storyteller. Tell short stories in simple words.",
)
TITLE_SHARE = 0.08
TOPICLESS_SHARE = 0.04
# of the tales from books are asked for as such; a plain request mostly gets a tale of the grammar
BOOKISH_SHARE = 0.7
SECOND_TOPIC_SHARE = 0.25
SYSTEM_SHARE = 0.06
WITH_SHARE = 0.3


def turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def reply_start() -> str:
    return f"{TURN_START}assistant\n"


def system_turn(rng: random.Random) -> str:
    """Now and then a system message, else nothing."""
    return turn("system", rng.choice(_SYSTEM_PROMPTS)) if rng.random() < SYSTEM_SHARE else ""


def topic_phrase(topics: list[str], rng: random.Random) -> str:
    """One topic, or two joined; the best topics are the likeliest."""
    first = topics[min(int(rng.expovariate(1.3)), len(topics) - 1)]
    others = [topic for topic in topics if topic != first]
    if others and rng.random() < SECOND_TOPIC_SHARE:
        return f"{first} and {rng.choice(others)}"
    return first


def book_request(topics: list[str], kind: str, rng: random.Random, title: str = "") -> str:
    """A request for a whole story from the corpora, mostly in words that say so (a fable,
    an old tale)."""
    if not topics or rng.random() >= BOOKISH_SHARE:
        return tale_request(topics, kind, rng, title)
    requests = (
        _OLD_BOOK_REQUESTS
        if kind not in _KIND_REQUESTS or rng.random() < 0.4
        else _KIND_REQUESTS[kind]
    )
    return rng.choice(requests).format(topic_phrase(topics, rng))


def tale_request(topics: list[str], kind: str, rng: random.Random, title: str = "") -> str:
    """A request for a whole story (one that starts at its beginning)."""
    if title and rng.random() < TITLE_SHARE:
        return rng.choice(
            (f'Tell me the story "{title}".', f"Tell me the story of {title}.", f'Write "{title}".')
        )
    if not topics or rng.random() < TOPICLESS_SHARE:
        return rng.choice(_TOPICLESS_REQUESTS)
    topic = topic_phrase(topics, rng)
    if kind in _KIND_REQUESTS and rng.random() < 0.2:
        return rng.choice(_KIND_REQUESTS[kind]).format(topic)
    texts, weights = zip(*_TALE_REQUESTS, strict=True)
    request: str = rng.choices(texts, weights)[0].format(topic)
    return request


def composed_request(topic: str, rng: random.Random) -> str:
    """A request for a tale that has all of the topic in it."""
    if rng.random() < WITH_SHARE:
        return rng.choice(_WITH_REQUESTS).format(topic)
    return tale_request([topic], "children", rng)


def scene_request(topics: list[str], rng: random.Random) -> str:
    """A request for a passage from the middle of a book."""
    return (
        rng.choice(_SCENE_REQUESTS).format(topic_phrase(topics, rng))
        if topics
        else "Go on with the story."
    )


def follow_up(topics: list[str], rng: random.Random) -> str:
    """A request for one more story in the same conversation."""
    return (
        rng.choice(_FOLLOW_UPS).format(topic_phrase(topics, rng))
        if topics
        else "Another one, please."
    )
