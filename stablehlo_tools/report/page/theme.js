"use strict";
// Runs in the head, so that the first paint has the right colours.

const THEMES = ["auto", "light", "dark"];
const THEME_KEY = "stablehlo-tools-theme";

/** Light or dark: as the system says, or as chosen; paper is always light. */
const theme = {
  choice: "auto",
  printing: false,
  /** @type {(() => void)[]} */
  listeners: [],
  system: window.matchMedia("(prefers-color-scheme: dark)"),

  resolved() {
    if (this.printing) return "light";
    if (this.choice !== "auto") return this.choice;
    return this.system.matches ? "dark" : "light";
  },
  apply() {
    document.documentElement.dataset.theme = this.resolved();
    for (const listener of this.listeners) listener();
  },
  next() {
    this.choice = THEMES[(THEMES.indexOf(this.choice) + 1) % THEMES.length];
    try {
      window.localStorage.setItem(THEME_KEY, this.choice);
    } catch {
      // A page opened from a file may have no storage; the choice then lasts as long as the page.
    }
    this.apply();
  },
  print(printing) {
    this.printing = printing;
    this.apply();
  },
};

try {
  const kept = window.localStorage.getItem(THEME_KEY);
  if (THEMES.includes(kept)) theme.choice = kept;
} catch {
  // As above.
}
theme.system.addEventListener("change", () => theme.apply());
theme.apply();

/** The colours that a canvas draws with, by the names that page.css gives them. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = [
    "surface", "text", "muted", "line", "grid", "lane", "accent",
    "band", "band-other",
    "compute", "compute-text", "product", "copy", "hidden", "hidden-text", "exposed", "exposed-text",
    "loop", "loop-stripe", "loop-text", "memory", "memory-line", "limit",
  ];
  return Object.fromEntries(names.map((name) => [name, colour(name)]));
}
