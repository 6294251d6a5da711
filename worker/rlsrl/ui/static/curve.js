// One metric of a run over env steps.

import { number, settle, shape } from "./elements.js";

const WIDTH = 1100, HEIGHT = 320, LEFT = 70, RIGHT = 20, TOP = 15, BOTTOM = 40, MOST = 1500;

export function draw(figure, rows, evaluations, metric, goalReturn) {
  const points = pointsOf(rows, "env_steps", metric);
  const evaluated = metric === "return_mean" ? pointsOf(evaluations, "evaluation/env_steps", "evaluation/return_mean") : [];
  const all = [...points, ...evaluated];
  if (!all.length) {
    settle(figure, `No values of ${metric} yet.`);
    return;
  }
  const goal = metric === "return_mean" && typeof goalReturn === "number" ? goalReturn : null;
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y).concat(goal === null ? [] : [goal]);
  const across = scale(Math.min(0, least(xs)), greatest(xs), LEFT, WIDTH - RIGHT);
  const down = scale(least(ys), greatest(ys), HEIGHT - BOTTOM, TOP);
  const line = points.map(([x, y], place) => `${place ? "L" : "M"}${across(x).toFixed(1)} ${down(y).toFixed(1)}`).join("");
  const last = points.at(-1) ?? evaluated.at(-1);
  settle(figure, shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: "100%", role: "img",
    "aria-label": `${metric} over env steps: ${number(last[1])} after ${number(last[0])}, ${points.length} points`,
  },
    shape("path", { class: "axis", d: `M${LEFT} ${TOP} V${HEIGHT - BOTTOM} H${WIDTH - RIGHT}` }),
    ...ticks(down.low, down.high).map((y) => shape("text", { x: LEFT - 8, y: down(y) + 4, "text-anchor": "end" }, number(y))),
    ...ticks(across.low, across.high).map((x) => shape("text", { x: across(x), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, number(x))),
    shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end", class: "dim" }, "env steps"),
    ...(goal === null ? [] : [shape("path", { class: "goal", d: `M${LEFT} ${down(goal)} H${WIDTH - RIGHT}` })]),
    shape("path", { class: "curve", d: line }),
    ...evaluated.map(([x, y]) => shape("circle", { class: "point", cx: across(x), cy: down(y), r: 4 },
      shape("title", {}, `evaluated: ${number(y)} at ${number(x)} env steps`))),
  ));
}

function pointsOf(rows, x, y) {
  const found = rows.map((row) => [row.scalars[x], row.scalars[y]]).filter(([at, value]) => typeof at === "number" && typeof value === "number");
  const every = Math.ceil(found.length / MOST);
  return found.filter((_, place) => place % every === 0 || place === found.length - 1);
}

function scale(low, high, from, to) {
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  return Object.assign(place, { low, high });
}

function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 5)), rough = (high - low) / 5 / power;
  const step = power * (rough >= 5 ? 10 : rough >= 2 ? 5 : rough >= 1 ? 2 : 1);
  const found = [];
  const first = Math.ceil(low / step) * step;
  for (let place = 0; place < 12 && first + place * step <= high + step / 1e6; place += 1)
    found.push(Number((first + place * step).toPrecision(12)));
  return found;
}

function least(values) {
  return values.reduce((a, b) => Math.min(a, b), Infinity);
}

function greatest(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}
