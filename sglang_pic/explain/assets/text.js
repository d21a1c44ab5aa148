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

function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (value >= size) {
      const scaled = value / (unit === "k" ? 1e3 : size);
      return `${scaled >= 100 ? Math.round(scaled) : scaled.toFixed(1)} ${unit}`;
    }
  }
  return count(value);
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

const CONTEXT_CHARS = 110;
const CHANGE_CHARS = 170;

function diff(found) {
  const box = element("div", "diff");
  // Only the nearest lines of the context, to recognise the place.
  const before = found.before.slice(-CONTEXT_CHARS).split("\n").slice(-2).join("\n").trimStart();
  const after = found.after.slice(0, CONTEXT_CHARS).split("\n").slice(0, 2).join("\n");
  box.append(before.length < found.before.length ? `…${before}` : before);
  const note = (text) => box.append(element("em", "", text));
  if (found.old) box.append(element("del", "", visible(clip(found.old, CHANGE_CHARS))));
  if (found.old && found.new) note(" → ");
  if (found.new) box.append(element("ins", "", visible(clip(found.new, CHANGE_CHARS))));
  if (found.newLen === null && !isRewind(found)) note(" (never in step again)");
  else box.append(after.length < found.after.length ? `${after}…` : after);
  return box;
}

function isRewind(found) {
  return found.group.cause.key === "rewind";
}

function sizes(found) {
  if (isRewind(found)) return "nothing differs";
  if (found.newLen === null) return "never in step again";
  if (!found.oldLen) return `+${plural(found.newLen, "token")}`;
  if (!found.newLen) return `−${plural(found.oldLen, "token")}`;
  return `${count(found.oldLen)} → ${plural(found.newLen, "token")}`;
}
