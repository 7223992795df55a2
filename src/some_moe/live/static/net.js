// What the page knows, and how it asks the server for more.
import { fill } from "./dom.js";

// --- asking the server -------------------------------------------------------------------------------------------
const KEY = "some-token";
if (/^#[\w-]{20,}$/.test(location.hash)) { // behind '#' nothing is sent; from here on it is only in this tab
  sessionStorage.setItem(KEY, location.hash.slice(1));
  history.replaceState(null, "", location.pathname + "#/");
}
export async function ask(path, body, signal) {
  const headers = { "x-some-token": sessionStorage.getItem(KEY) || "" };
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, { headers, signal, ...(body !== undefined && { method: "POST", body: JSON.stringify(body) }) });
  if (!answer.ok) {
    const text = await answer.text();
    let said = `the server answered ${answer.status}`;
    try { said = JSON.parse(text).error.message; } catch { /* not ours */ }
    throw Object.assign(new Error(said), { status: answer.status });
  }
  return answer;
}
export const askJson = async (path, body, signal) => (await ask(path, body, signal)).json();
export async function* lines(answer) { // of a body that comes in pieces
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

// --- what is known -------------------------------------------------------------------------------------------------
export const store = { runs: new Map(), queues: [], names: null };

export class Log { // the logs of the run that is open, as columns
  constructor(id) { this.id = id; this.places = { metrics: "", samples: "" }; this.clear("metrics"); this.clear("samples"); }
  clear(name) {
    if (name === "metrics") Object.assign(this, { steps: Object.fromEntries((store.names?.step || []).map((n) => [n, []])), evaluations: [] });
    else this.samples = [];
  }
  add(name, { place, rows }) {
    this.places[name] = place;
    if (name === "samples") return void this.samples.push(...rows);
    for (const [i, n] of store.names.step.entries()) { const column = (this.steps[n] ||= []); for (const row of rows.steps) column.push(row[i] ?? NaN); }
    for (const row of rows.evaluations) {
      const one = Object.fromEntries(store.names.evaluation.map((n, i) => [n, row[i] ?? NaN]));
      one.layers = row[row.length - 1].map((l) => Object.fromEntries(store.names.layer.map((n, i) => [n, l[i] ?? NaN])));
      this.evaluations.push(one);
    }
  }
}

export function place(title, ...where) { // what stands in the bar, and in the tab
  fill(document.getElementById("crumbs"), where);
  document.title = title ? `${title} · SoME live` : "SoME live";
}
