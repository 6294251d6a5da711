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

// Give a table's body a row for each item. A focused link keeps its focus.
export function replace(body, items, cells) {
  const focused = body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  body.replaceChildren(...items.map((item) => element("tr", {}, ...cells(item))));
  if (focused !== null) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
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
