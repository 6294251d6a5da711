// The page of `rlsrl ui`: a list of runs, and one run. It asks the server each second and changes what is not equal.

import { draw } from "./curve.js";
import { picture } from "./picture.js";
import { ago, element, isSelected, number, rows, settle } from "./elements.js";

const MOST_PARTS = 100; // of a curve that are read in one look
const LIST_MS = 2000, RUN_MS = 1000, VERSIONS_MS = 2000, LOG_MS = 3000;
const main = document.getElementById("main"), where = document.getElementById("where"), age = document.getElementById("age");
const said = document.getElementById("said"); // screen readers read it when it changes

const problems = new Map(); // of the view that is shown, by what asks
let shown = 0; // number of the view that is shown: answers of earlier ones are dropped
let announced = ""; // what was said last, without what changes all the time

async function ask(path) {
  const answer = await fetch(path);
  if (answer.status === 404) throw new Error("there is no such run");
  if (answer.status === 503) throw new Error(await answer.text());
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

// Call `look` again and again while the view is shown and visible. An error is said, and the next look tries again.
function repeat(view, milliseconds, look) {
  const again = async () => {
    if (view !== shown) return;
    if (!document.hidden) {
      try {
        await look();
        if (view === shown) say(look, "");
      } catch (error) {
        if (view === shown) say(look, `not up to date: ${error.message}`);
      }
    }
    setTimeout(again, milliseconds);
  };
  again();
}

// Show the problem of what asks, or that it has none.
function say(asks, text) {
  if (text) problems.set(asks, text);
  else problems.delete(asks);
  const [first = ""] = problems.values();
  if (age.textContent !== first) age.textContent = first;
}

// Have screen readers read a state and the problems once, and again when another state or problem comes: numbers and
// details change all the time.
function announce(state, problems) {
  const kinds = [state, ...problems.map((problem) => problem.split(":")[0].replace(/\d[\d.,]*/g, ""))].join("\n");
  if (kinds === announced) return;
  announced = kinds;
  said.textContent = [state, ...problems.map((problem) => problem.split("\n")[0])].join(". ");
}

function stateOf(run) {
  return element("span", { class: `state ${run.state.replaceAll(" ", "-")}` }, run.state);
}

// ---- the list

function showList(view, problem) {
  where.textContent = "";
  document.title = "Runs - rlsrl";
  const body = element("tbody", {});
  const none = element("p", { hidden: true }, "There are no runs yet. `rlsrl run experiment.yaml` begins one on a machine, `kubectl apply -f experiment.yaml` on a cluster.");
  const heads = [["Run"], ["State"], ["Mean return", 1], ["Env steps", 1], ["Steps/s", 1], ["Changed"]];
  const head = heads.map(([text, isNumber]) => element("th", { scope: "col", class: isNumber ? "number" : "" }, text));
  main.replaceChildren(
    ...(problem ? [element("p", { class: "problems" }, problem)] : []), element("h1", {}, "Runs"), none,
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), body)),
  );
  if (problem) announce(problem, []);
  repeat(view, LIST_MS, async () => {
    const runs = await ask("/api/runs");
    none.hidden = runs.length > 0;
    rows(body, runs, (run) => [
      element("td", {}, element("a", { href: `#/run/${encoded(run.name)}` }, run.name)),
      element("td", {}, stateOf(run)),
      ...[run.returnMean, run.envSteps, run.stepsPerSecond].map((value) => element("td", { class: "number" }, number(value))),
      element("td", {}, ago(run.changedAt)),
    ], (run) => run.name);
  });
}

// ---- one run

function showRun(view, name) {
  const path = `/api/runs/${encoded(name)}`;
  where.textContent = name;
  document.title = `${name} - rlsrl`;
  const facts = element("dl", { class: "facts" }), troubles = element("div", {}), goals = element("div", {});
  const roles = element("figure", { tabindex: "0", "aria-label": "workers" }), rolesBody = element("tbody", {});
  const chart = element("figure", { "aria-label": "curve" }), metric = element("select", { id: "metric" });
  const versions = element("tbody", {}), unread = element("div", {}), ledger = element("tbody", {});
  const log = element("pre", { tabindex: "0", role: "region", "aria-label": "last lines of the log" }), logs = element("select", { id: "log" });
  const text = element("pre", { tabindex: "0", role: "region", "aria-label": "experiment" });
  const conditions = element("section", {}), conditionsBody = element("tbody", {});
  // A table may be wider than the page: the keyboard reaches it, to scroll it.
  const table = (title, heads, body) => element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title },
    element("table", { "aria-label": title },
      element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), body));
  conditions.replaceChildren(element("h2", {}, "Conditions"),
    table("Conditions", ["Condition", "Status", "Reason", "Since", "Message", "What to do"], conditionsBody));
  main.replaceChildren(
    element("h1", {}, name), facts, troubles, goals, conditions,
    element("h2", {}, "Workers"), roles,
    element("p", { class: "legend" },
      element("span", { class: "swatch busy" }), "works", element("span", { class: "swatch wait" }), "waits",
      element("span", { class: "swatch bad" }), "does not run", element("span", { class: "swatch ended" }), "has ended"),
    element("details", {}, element("summary", {}, "As a table"),
      table("Workers", ["Worker", "State", "Busy", "Works on", "Waits for", "Version", "Per second"], rolesBody)),
    element("h2", {}, "Curve"),
    element("p", {}, element("label", { for: "metric" }, "Metric "), metric), chart,
    element("h2", {}, "Versions"), unread, table("Versions", ["Version", "Tags", "Env steps", "Mean return", "Evaluation", "Resumable", "Stored"], versions),
    element("h2", {}, "Ledger"), table("Ledger", ["Transitions", "Number"], ledger),
    element("h2", {}, "Logs"), element("p", {}, element("label", { for: "log" }, "Worker "), logs), log,
    element("details", {}, element("summary", {}, "Experiment"), text),
  );

  const curve = { rows: [], evaluated: new Map(), next: 0, file: "" }; // rows of the trainer; of evaluators by step
  let page = null;
  const redraw = () => draw(chart, curve.rows, [...curve.evaluated.values()], metric.value || "return_mean", page && page.goalReturn);
  metric.addEventListener("change", redraw);

  repeat(view, RUN_MS, async () => {
    page = await ask(path);
    if (view !== shown) return;
    showFacts(facts, page);
    announce(`${name}: ${page.state}`, page.problems);
    settle(troubles, ...page.problems.map((problem) =>
      element("p", { class: `problems ${problem.startsWith("FAILED") ? "failed" : ""}` }, problem)));
    settle(goals, ...page.goals.map(goalLine));
    conditions.hidden = page.conditions.length === 0;
    rows(conditionsBody, page.conditions, (condition) => [
      element("th", { scope: "row" }, condition.type), element("td", {}, condition.status),
      element("td", {}, element("span", { class: condition.isTrouble ? "trouble" : "" }, condition.reason)),
      element("td", {}, ago(condition.since)), element("td", { class: "text" }, condition.message),
      element("td", { class: "text" }, condition.cure),
    ], (condition) => condition.type);
    picture(roles, page.roles);
    rows(rolesBody, workersOf(page.roles), (worker) => [
      element("th", { scope: "row" }, `${worker.role} ${worker.index ?? ""}`),
      element("td", {}, element("span", { class: `state ${worker.mark}` }, worker.state)),
      element("td", {}, worker.busy === null ? "-" : `${Math.round(100 * worker.busy)} %`),
      element("td", {}, sharesOf(worker.works)), element("td", {}, sharesOf(worker.waits) || worker.waitsFor), element("td", {}, worker.version), element("td", {}, number(worker.perSecond)),
    ]);
    rows(ledger, Object.entries(page.ledger).filter(([, value]) => typeof value === "number"), ([title, value]) => [
      element("th", { scope: "row" }, title), element("td", {}, number(value)),
    ]);
    if (page.logs) options(logs, page.logs); // they are not known while a coordinator is away
    if (text.textContent !== page.experiment) text.textContent = page.experiment;
    await more(view, path, curve);
    if (view !== shown) return;
    options(metric, metricsOf(curve.rows));
    redraw();
  });
  repeat(view, VERSIONS_MS, async () => {
    const found = await ask(`${path}/versions`);
    settle(unread, ...(found.problem ? [element("p", { class: "problems" }, found.problem)] : []));
    rows(versions, found.versions, (version) => [
      element("th", { scope: "row" }, version.version), element("td", {}, version.tags.join(", ")),
      ...[version.envSteps, version.returnMean, version.evaluation].map((value) => element("td", {}, number(value))),
      element("td", {}, version.hasState ? "yes" : ""), element("td", {}, ago(version.createdAt)),
    ], (version) => version.version);
  });
  const showLog = logShower(view, path, logs, log);
  logs.addEventListener("change", () => showLog().catch((error) => view === shown && say(showLog, error.message)));
  repeat(view, LOG_MS, showLog);
}

// Return a function that shows the end of the chosen log. The choice may change while an answer is awaited: only the
// answer to the last question counts.
function logShower(view, path, logs, log) {
  let asked = 0, name = ""; // of the last question; of the log that is shown
  return async () => {
    if (!logs.value) return;
    const question = (asked += 1), chosen = logs.value;
    const lines = (await ask(`${path}/logs/${encoded(chosen)}`)).join("\n");
    if (question !== asked || view !== shown) return;
    if (log.textContent === lines || (name === chosen && isSelected(log))) return;
    const isAtEnd = name !== chosen || log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    log.textContent = lines;
    name = chosen;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
}

function showFacts(facts, page) {
  const totals = page.totals;
  const listed = [
    ["State", stateOf(page)],
    ["Mean return", number(page.returnMean)],
    ["Env steps", number(page.envSteps)],
    ["Env steps a second", number(page.stepsPerSecond)],
    ["Training steps", number(page.trainSteps)],
    ["Policy lag", number(totals.policy_lag)],
    ["Version", totals.version ?? "-"],
  ];
  settle(facts, ...listed.map(([title, value]) =>
    element("div", {}, element("dt", {}, title), element("dd", {}, value))));
}

function goalLine(goal) {
  if (goal.fraction === undefined) return element("p", {}, goal.label);
  const bar = element("progress", { max: 1, value: goal.fraction, "aria-label": `progress of ${goal.label}` });
  return element("p", {}, bar, ` ${goal.label} ${number(goal.current)} of ${number(goal.target)}`);
}

function workersOf(roles) {
  return Object.entries(roles).flatMap(([role, each]) => each.workers.map((worker) => ({ role, ...worker })));
}

function sharesOf(shares) {
  const largest = Object.entries(shares).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
  return largest.map(([name, share]) => `${name} ${Math.round(100 * share)} %`).join(", ");
}

// Read the rows that are new. A trainer that resumed repeats steps: its earlier rows of them do not count.
async function more(view, path, curve) {
  for (let part = 0, isFull = true; isFull && part < MOST_PARTS; part += 1) {
    const answer = await ask(`${path}/curve?after=${curve.next}&file=${encoded(curve.file)}`);
    if (view !== shown) return;
    if (answer.anew) [curve.rows, curve.evaluated] = [[], new Map()];
    for (const row of answer.rows) {
      if (row.role === "trainer") while (curve.rows.at(-1)?.step >= row.step) curve.rows.pop();
      if (row.role === "trainer") curve.rows.push(row);
      if (row.role === "evaluator") curve.evaluated.set(row.step, row); // an evaluation that is repeated counts once
    }
    isFull = answer.more && answer.next !== curve.next;
    [curve.next, curve.file] = [answer.next, answer.file];
  }
}

function metricsOf(rows) {
  const names = new Set(["return_mean"]);
  for (const row of rows) for (const name of Object.keys(row.scalars)) names.add(name);
  const plain = [...names].filter((name) => !["env_steps", "train_steps"].includes(name));
  return plain.sort((a, b) => (b === "return_mean") - (a === "return_mean") || a.localeCompare(b));
}

// Give a select these options, and keep what is chosen.
function options(select, values) {
  if (values.length === select.options.length && values.every((value, place) => select.options[place].value === value)) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((value) => element("option", { value }, value)));
  if (values.includes(chosen)) select.value = chosen;
}

// A folder's name may hold bytes that are no text: they become marks, and the server finds no such run.
function encoded(name) {
  return encodeURIComponent(name.toWellFormed());
}

// Return the name in an address; null if the address is malformed.
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return null;
  }
}

function route() {
  const [, kind, part] = location.hash.split("/");
  const name = kind === "run" && part ? decoded(part) : "";
  shown += 1;
  problems.clear();
  age.textContent = said.textContent = announced = "";
  if (name) showRun(shown, name);
  else showList(shown, name === null ? `The address ${location.hash} names no run.` : "");
  window.scrollTo(0, 0);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  main.focus();
});
window.addEventListener("hashchange", () => {
  route();
  main.focus();
});
route();
