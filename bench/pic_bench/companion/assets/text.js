// Makes nodes, and numbers as people read them.

function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function button(label, action, className = "") {
  const node = element("button", className, label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

const wholeNumber = new Intl.NumberFormat("en-US");

function count(value) {
  return wholeNumber.format(value);
}

function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share > 0 && share < 0.1 ? share.toFixed(2) : share.toFixed(1)} %`;
}

function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

function signed(value) {
  if (!value) return "0";
  return value < 0 ? `−${count(-value)}` : `+${count(value)}`;
}

function nameOf(call) {
  return `${call.session.name} · call ${call.index}`;
}

// Makes spaces and line ends visible in text that changed.
function visible(text) {
  const shown = text.replaceAll("\r", "␍").replace(/\n+/g, (ends) => `${"↵".repeat(ends.length)}\n`).replaceAll("\t", "⇥");
  return /\S/.test(text) ? shown : shown.replaceAll(" ", "·");
}

// Leaves out the middle of a long text.
function clip(text, most) {
  if (text.length <= most + 10) return text;
  const tail = Math.floor(most / 3);
  return `${text.slice(0, most - tail)} […] ${text.slice(-tail)}`;
}
