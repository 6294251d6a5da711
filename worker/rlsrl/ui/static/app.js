// The page of `rlsrl ui`: a list of runs, and one run. It asks the server each second and draws what changed.

import { draw } from "./curve.js";
import { picture } from "./picture.js";
import { ago, element, number, replace } from "./elements.js";

const LIST_MS = 2000, RUN_MS = 1000, LOG_MS = 3000;
const main = document.getElementById("main"), where = document.getElementById("where"), age = document.getElementById("age");

let shown = 0; // number of the view that is shown: answers of earlier ones are dropped

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(answer.status === 404 ? "there is no such run" : `the server answers ${answer.status}`);
  return answer.json();
}

// Call `look` again and again while the view is shown and visible. An error is said, and the next look tries again.
function repeat(view, milliseconds, look) {
  const again = async () => {
    if (view !== shown) return;
    if (!document.hidden) {
      try {
        await look();
        if (view === shown) say("");
      } catch (error) {
        if (view === shown) say(`not up to date: ${error.message}`);
      }
    }
    setTimeout(again, milliseconds);
  };
  again();
}

function say(text) {
  if (age.textContent !== text) age.textContent = text;
}

function stateOf(run) {
  return element("span", { class: `state ${run.state.replaceAll(" ", "-")}` }, run.state);
}

// ---- the list

function showList(view) {
  where.textContent = "";
  document.title = "Runs - rlsrl";
  const body = element("tbody", {});
  const none = element("p", { hidden: true }, "There are no runs in this folder yet: `rlsrl run experiment.yaml` begins one.");
  const heads = [["Run"], ["State"], ["Mean return", 1], ["Env steps", 1], ["Steps/s", 1], ["Changed"]];
  const head = heads.map(([text, isNumber]) => element("th", { scope: "col", class: isNumber ? "number" : "" }, text));
  main.replaceChildren(
    element("h1", {}, "Runs"), none,
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), body)),
  );
  repeat(view, LIST_MS, async () => {
    const runs = await ask("/api/runs");
    none.hidden = runs.length > 0;
    replace(body, runs, (run) => [
      element("td", {}, element("a", { href: `#/run/${encodeURIComponent(run.name)}` }, run.name)),
      element("td", {}, stateOf(run)),
      ...[run.returnMean, run.envSteps, run.stepsPerSecond].map((value) => element("td", { class: "number" }, number(value))),
      element("td", {}, ago(run.changedAt)),
    ]);
  });
}

// ---- one run

function showRun(view, name) {
  const path = `/api/runs/${encodeURIComponent(name)}`;
  where.textContent = name;
  document.title = `${name} - rlsrl`;
  const facts = element("dl", { class: "facts" }), problems = element("div", {}), goals = element("div", {});
  const roles = element("figure", {}), rolesBody = element("tbody", {});
  const chart = element("figure", {}), metric = element("select", { id: "metric" });
  const versions = element("tbody", {}), ledger = element("tbody", {});
  const log = element("pre", { tabindex: "0", "aria-label": "last lines of the log" }), logs = element("select", { id: "log" });
  const text = element("pre", { tabindex: "0", "aria-label": "experiment" });
  const table = (heads, body) => element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), body));
  main.replaceChildren(
    element("h1", {}, name), facts, problems, goals,
    element("h2", {}, "Workers"), roles,
    element("p", { class: "legend" },
      element("span", { class: "swatch busy" }), "works", element("span", { class: "swatch wait" }), "waits",
      element("span", { class: "swatch bad" }), "does not run"),
    element("details", {}, element("summary", {}, "As a table"),
      table(["Worker", "State", "Busy", "Waits for", "Version", "Per second"], rolesBody)),
    element("h2", {}, "Curve"),
    element("p", {}, element("label", { for: "metric" }, "Metric "), metric), chart,
    element("h2", {}, "Versions"), table(["Version", "Tags", "Env steps", "Mean return", "Evaluation", "State", "Stored"], versions),
    element("h2", {}, "Ledger"), table(["Transitions", "Number"], ledger),
    element("h2", {}, "Logs"), element("p", {}, element("label", { for: "log" }, "Worker "), logs), log,
    element("details", {}, element("summary", {}, "Experiment"), text),
  );

  const curve = { rows: [], evaluated: new Map(), next: 0 }; // rows of the trainer; of evaluators by step
  let page = null;
  const redraw = () => draw(chart, curve.rows, [...curve.evaluated.values()], metric.value || "return_mean", page && page.goalReturn);
  metric.addEventListener("change", redraw);

  repeat(view, RUN_MS, async () => {
    page = await ask(path);
    if (view !== shown) return;
    showFacts(facts, page);
    problems.replaceChildren(...page.problems.map((problem) =>
      element("p", { class: `problems ${problem.startsWith("FAILED") ? "failed" : ""}` }, problem)));
    goals.replaceChildren(...page.goals.map(goalLine));
    picture(roles, page.roles);
    replace(rolesBody, workersOf(page.roles), (worker) => [
      element("th", { scope: "row" }, `${worker.role} ${worker.index ?? ""}`), element("td", {}, worker.state),
      element("td", {}, worker.busy === null ? "-" : `${Math.round(100 * worker.busy)} %`),
      element("td", {}, waitsOf(worker)), element("td", {}, worker.version), element("td", {}, number(worker.perSecond)),
    ]);
    replace(versions, page.versions, (version) => [
      element("th", { scope: "row" }, version.version), element("td", {}, version.tags.join(", ")),
      ...[version.envSteps, version.returnMean, version.evaluation].map((value) => element("td", {}, number(value))),
      element("td", {}, version.hasState ? "yes" : ""), element("td", {}, ago(version.createdAt)),
    ]);
    replace(ledger, Object.entries(page.ledger).filter(([, value]) => typeof value === "number"), ([title, value]) => [
      element("th", { scope: "row" }, title), element("td", {}, number(value)),
    ]);
    options(logs, page.logs);
    if (text.textContent !== page.experiment) text.textContent = page.experiment;
    await more(path, curve);
    if (view !== shown) return;
    options(metric, metricsOf(curve.rows));
    redraw();
  });
  const showLog = async () => {
    if (!logs.value) return;
    const lines = (await ask(`${path}/logs/${encodeURIComponent(logs.value)}`)).join("\n");
    if (log.textContent === lines) return;
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    log.textContent = lines;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
  logs.addEventListener("change", () => showLog().catch((error) => say(error.message)));
  repeat(view, LOG_MS, showLog);
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
  facts.replaceChildren(...listed.map(([title, value]) =>
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

function waitsOf(worker) {
  const shares = Object.entries(worker.waits).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
  return shares.map(([name, share]) => `${name} ${Math.round(100 * share)} %`).join(", ") || worker.waitsFor;
}

// Read the rows that are new. A trainer that resumed repeats steps: its earlier rows of them do not count.
async function more(path, curve) {
  for (let isFull = true; isFull;) {
    const answer = await ask(`${path}/curve?after=${curve.next}`);
    if (answer.anew) [curve.rows, curve.evaluated] = [[], new Map()];
    for (const row of answer.rows) {
      if (row.role === "trainer") while (curve.rows.at(-1)?.step >= row.step) curve.rows.pop();
      if (row.role === "trainer") curve.rows.push(row);
      if (row.role === "evaluator") curve.evaluated.set(row.step, row); // an evaluation that is repeated counts once
    }
    isFull = answer.next !== curve.next && answer.rows.length > 1000;
    curve.next = answer.next;
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

function route() {
  const [, kind, name] = location.hash.split("/");
  shown += 1;
  say("");
  if (kind === "run" && name) showRun(shown, decodeURIComponent(name));
  else showList(shown);
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
