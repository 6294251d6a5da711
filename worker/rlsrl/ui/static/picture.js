// The workers of each role as boxes, and the way of the samples between the roles.

import { number, settle, shape } from "./elements.js";

const WAY = ["actor", "buffer", "trainer"], ASIDE = ["policy", "evaluator", "coordinator"];
const BOX = 14, GAP = 3, COLUMNS = 16, WIDTH = 200, MOST = 512;

export function picture(figure, roles) {
  const way = WAY.filter((role) => roles[role]?.workers.length), aside = ASIDE.filter((role) => roles[role]?.workers.length);
  const others = Object.keys(roles).filter((role) => !WAY.includes(role) && !ASIDE.includes(role) && roles[role].workers.length);
  const columns = [...way.map((role) => [role]), ...(aside.length + others.length ? [[...aside, ...others]] : [])];
  if (!columns.length) {
    settle(figure, "No worker has reported.");
    return;
  }
  const drawn = [];
  let height = 0;
  columns.forEach((column, place) => {
    let y = 0;
    for (const role of column) {
      drawn.push(group(role, roles[role], place * (WIDTH + 60), y));
      y += heightOf(roles[role]) + 30;
    }
    height = Math.max(height, y);
  });
  way.slice(0, -1).forEach((role, place) => drawn.push(...arrow(place * (WIDTH + 60) + WIDTH + 6, roles[role].perSecond)));
  const width = columns.length * (WIDTH + 60) - 60;
  const summary = `${columns.flat().map((role) => said(role, roles[role])).join("; ")}. The table that follows has each worker.`;
  const head = shape("marker", { id: "head", markerWidth: 8, markerHeight: 8, refX: 6, refY: 3, orient: "auto" },
    shape("path", { d: "M0 0 L6 3 L0 6", fill: "none", stroke: "currentColor" }));
  settle(figure, shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary },
    shape("defs", {}, head), ...drawn));
}

function heightOf(role) {
  return 28 + Math.ceil(Math.min(role.workers.length, MOST) / COLUMNS) * (BOX + GAP);
}

// A role for screen readers: how many workers there are, and how many are in each state.
function said(role, of) {
  const states = new Map();
  for (const { state } of of.workers) states.set(state, (states.get(state) ?? 0) + 1);
  return `${of.number} ${role}: ${[...states].map(([state, many]) => `${many} ${state}`).join(", ")}`;
}

// The workers that are drawn: all, or those that do not run and as many of the others as there is room for.
function drawnOf(workers) {
  if (workers.length <= MOST) return workers;
  const [bad, others] = [true, false].map((isBad) => workers.filter((worker) => (worker.mark === "bad") === isBad));
  return [...bad, ...others].slice(0, MOST);
}

function group(role, of, x, y) {
  const rest = of.workers.length > MOST ? `, ${MOST} shown` : "";
  const boxes = drawnOf(of.workers).map((worker, place) => {
    const left = (place % COLUMNS) * (BOX + GAP) * ((WIDTH / COLUMNS) / (BOX + GAP)), top = 24 + Math.floor(place / COLUMNS) * (BOX + GAP);
    const busy = worker.mark === "alive" ? Math.min(1, worker.busy ?? 0) : 0;
    const size = Math.min(BOX, WIDTH / COLUMNS - 2);
    const parts = [["works on", worker.works], ["waits for", worker.waits]].map(([verb, shares]) => [verb, largestOf(shares)]);
    const doing = parts.filter(([, name]) => name).map(([verb, name]) => `, ${verb} ${name}`).join("");
    const title = `${role} ${worker.index ?? ""}: ${worker.state}${worker.busy === null ? "" : `, busy ${Math.round(100 * busy)} %`}${doing}`;
    const box = shape("rect", { x: left, y: top, width: size, height: BOX, class: worker.mark });
    const work = shape("rect", { x: left, y: top + BOX * (1 - busy), width: size, height: BOX * busy, class: "busy" });
    const cross = shape("path", { class: "cross", d: `M${left} ${top + BOX} l${size} ${-BOX}` });
    return shape("g", {}, shape("title", {}, title), box, ...{ alive: [work], bad: [cross], ended: [] }[worker.mark]);
  });
  return shape("g", { transform: `translate(${x} ${y})` }, shape("text", { x: 0, y: 14 }, `${of.number} ${role}${rest}`), ...boxes);
}

// The name with the largest share; undefined without any.
function largestOf(shares) {
  return Object.keys(shares).sort((a, b) => shares[b] - shares[a])[0];
}

function arrow(x, rate) {
  const label = rate === null ? [] : [shape("text", { x: x + 24, y: 22, "text-anchor": "middle", class: "dim" }, `${number(rate)}/s`)];
  return [shape("path", { d: `M${x} 32 h44`, class: "arrow" }), ...label];
}
