// Small parts that the three experiments share.

function byId(name) {
  return document.getElementById(name);
}

// Fills a list with options; groups are made where `groupOf` names one.
function fill(list, items, labelOf, groupOf) {
  const groups = new Map();
  list.replaceChildren();
  items.forEach((item, number) => {
    const option = new Option(labelOf(item), number);
    const name = groupOf ? groupOf(item) : "";
    if (!groups.has(name)) groups.set(name, name ? list.appendChild(Object.assign(document.createElement("optgroup"), { label: name })) : list);
    groups.get(name).append(option);
  });
}

// Nats as the study writes them: .0020, 5.1e-4.
function nats(value) {
  if (value === 0) return "0";
  if (Math.abs(value) < 0.001) return value.toExponential(1);
  return value.toFixed(value < 0.01 ? 4 : value < 0.1 ? 3 : 2).replace(/^(-?)0\./, "$1.");
}

// A share as a length for styles.
function length(value) {
  return `${100 * Math.min(1, Math.max(0, value))}%`;
}

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)}\u00a0ms` : `${value.toFixed(2)}\u00a0s`;
}

function code(text) {
  return `bench/results/${text}`;
}
