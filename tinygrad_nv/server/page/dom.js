// Elements, notices and the clipboard. Text reaches the page as text nodes only, never as HTML.

export const $ = (id) => document.getElementById(id);
const SVG = $("icons").namespaceURI;
const NOTICE_MS = 8000;
const COPIED_MS = 1600;

// An element with properties, data-… (under `data`), aria-… (under `aria`) and children: nodes, strings, null, or
// lists of them, which may be long.
export function make(name, { data = {}, aria = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  Object.assign(element.dataset, data);
  for (const [key, value] of Object.entries(aria)) element.setAttribute(`aria-${key}`, value);
  for (const child of children.flat()) if (child !== null) element.append(child);
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

// A button that shows an icon, and says `label`.
export function iconButton(name, label, onclick, className = "quiet-button") {
  return make("button", { type: "button", className, title: label, aria: { label }, onclick }, icon(name));
}

// Spoken by screen readers after what they say now.
export function announce(text) {
  $("announcer").textContent = "";
  // the same words twice are a change only if there was none between
  setTimeout(() => { $("announcer").textContent = text; }, 50);
}

let hiding = 0;
// A line at the bottom of the page, with an action if there is one.
export function notice(text, action = null, act = null) {
  clearTimeout(hiding);
  const hide = () => $("notice").replaceChildren();
  const button = action && make("button", { type: "button", onclick: () => { hide(); act(); } }, action);
  const close = iconButton("close", "Dismiss", hide);
  $("notice").replaceChildren(make("p", {}, text), ...(button ? [button] : []), close);
  hiding = setTimeout(hide, NOTICE_MS);
}

async function copy(text) {
  try { await navigator.clipboard.writeText(text); }
  catch {
    // without HTTPS, other hosts than localhost have no clipboard API
    const field = make("textarea", { value: text, className: "hidden" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    if (!done) return notice("The browser does not allow copying here: select the text and copy it.");
  }
  announce("Copied.");
}

// A button that copies what `text()` returns, and shows for a moment that it has.
export function copyButton(label, text, className) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), COPIED_MS);
  }, className);
  return button;
}

// Saves a file from the page.
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
