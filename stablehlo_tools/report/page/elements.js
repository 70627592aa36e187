"use strict";

/**
 * An element with attributes and children. Strings become text nodes: no name from the program is
 * ever read as HTML.
 */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) made.style.setProperty(name, String(value));
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

/** Terms and what they are; pairs without a value are left out. */
function definitions(pairs, attributes = {}) {
  const list = element("dl", attributes);
  for (const [term, ...values] of pairs) {
    if (values.every((value) => value === null || value === undefined || value === "")) continue;
    list.append(element("dt", {}, term), element("dd", {}, ...values));
  }
  return list;
}
