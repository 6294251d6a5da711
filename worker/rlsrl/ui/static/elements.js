// Making and changing elements.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== "") made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function shape(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Give an element these children. What is equal already stays as it is, and so do the selection and the focus in it.
// Children with a `data-key` are recognised by it, others by their place.
export function settle(parent, ...children) {
  const made = children.map((child) => (child instanceof Node ? child : document.createTextNode(child)));
  const keys = new Set(made.map(keyOf)), kept = new Map();
  for (const child of [...parent.childNodes]) {
    const key = keyOf(child);
    if (key === undefined) continue;
    if (keys.has(key)) kept.set(key, child);
    else child.remove();
  }
  let place = parent.firstChild;
  for (const node of made) {
    const key = keyOf(node), old = key === undefined ? place : kept.get(key);
    if (!old || old.nodeName !== node.nodeName || keyOf(old) !== key) {
      parent.insertBefore(node, place);
      continue;
    }
    if (old !== place) move(parent, old, place);
    update(old, node);
    place = old.nextSibling;
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function keyOf(node) {
  return node.dataset?.key;
}

// A browser takes the focus from what is moved.
function move(parent, node, place) {
  const focused = document.activeElement;
  parent.insertBefore(node, place);
  if (node.contains(focused)) focused.focus();
}

function update(node, made) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== made.data) node.data = made.data;
    return;
  }
  for (const { name } of [...node.attributes]) if (!made.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value } of made.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  settle(node, ...made.childNodes);
}

// Give a table's body a row for each item. A row is recognised by its key, if there is one.
export function rows(body, items, cells, key) {
  settle(body, ...items.map((item) => element("tr", key ? { "data-key": key(item) } : {}, ...cells(item))));
}

// Say whether the user has selected text in the element.
export function isSelected(node) {
  const selection = document.getSelection();
  return !selection.isCollapsed && selection.containsNode(node, true);
}

export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  if (Math.abs(value) < 10) return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  const digits = Math.abs(value) >= 1000 ? 0 : 1;
  return value.toLocaleString("en", { maximumFractionDigits: Number.isInteger(value) ? 0 : digits });
}

export function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  return `${Math.floor(passed)} s ago`;
}
