// Colours of requests, and of everything that is drawn on a canvas; all follow the theme.

const GOLDEN_ANGLE = 137.508; // neighbouring numbers get distant hues
const THEMES = {
  light: { lightness: 0.72, chroma: 0.095 },
  dark: { lightness: 0.7, chroma: 0.09 },
};

export function theme() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

export function requestColour(number, alpha = 1) {
  const { lightness, chroma } = THEMES[theme()];
  const hue = (32 + number * GOLDEN_ANGLE) % 360;
  return `oklch(${lightness} ${chroma} ${hue.toFixed(1)} / ${alpha})`;
}

// The value of a variable of the style sheet.
export function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function applyTheme(name) {
  document.documentElement.dataset.theme = name;
}

export function initialTheme() {
  const chosen = localStorage.getItem("quire-theme");
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

export function toggleTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  localStorage.setItem("quire-theme", next);
  applyTheme(next);
}
