// The pool view and the try-it box. What must survive a reload is in localStorage: the response's id, the number of the
// last event that was shown, and the text up to there, written together so that they always agree.
import { eventsOf } from "/static/sse.js";

const SAVED = "prism.answer";
const KEY = "prism.key";
const POLL_MS = 1000;
const RETRY_MS = [300, 1000, 3000];
const FINAL = new Set(["response.completed", "response.incomplete", "response.failed", "error"]);

const $ = (id) => document.getElementById(id);
const show = (id, value) => { $(id).textContent = value; };
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...extra } : extra;
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message ?? `the gateway answered ${response.status}`);
}

// --- the pool ---------------------------------------------------------------------------------------------------------

let before = null;

async function lookAtPool() {
  try {
    const pool = await (await ask("/pool")).json();
    showPool(pool);
    show("pool-note", "");
    before = pool;
  } catch (error) {
    show("pool-note", error instanceof Refused ? error.message : "The gateway does not answer.");
  }
}

function showPool(pool) {
  if (before && pool.now_ms > before.now_ms) {
    const rate = (pool.generation_tokens - before.generation_tokens) / ((pool.now_ms - before.now_ms) / 1000);
    show("tokens-per-s", Math.max(0, rate).toFixed(1));
  }
  for (const name of ["running", "streams", "boxed", "parked", "takeovers"]) show(name, pool[name]);
  for (const name of ["interactive", "background", "batch"]) show(`queued-${name}`, pool.queued[name]);
  const rows = pool.workers.map((worker) => {
    const row = document.createElement("tr");
    for (const cell of ["name", "model", "state", "running", "queued", "tokens"]) {
      row.insertCell().textContent = worker[cell];
    }
    return row;
  });
  $("workers").replaceChildren(...rows);
}

async function listModels() {
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  } catch {
    $("model").replaceChildren();
  }
}

// --- the try-it box ---------------------------------------------------------------------------------------------------

let current = null; // {id, seq, text, thought, prompt, ended}
let stopping = false;

function save() {
  localStorage.setItem(SAVED, JSON.stringify(current));
}

function render(status) {
  show("answer", current?.text ?? "");
  show("thought", current?.thought ?? "");
  $("thought-box").hidden = !current?.thought;
  const busy = current !== null && !current.ended;
  $("start").disabled = busy;
  $("stop").disabled = !busy;
  document.body.dataset.state = busy ? "busy" : "idle";
  if (status !== undefined) show("status", status);
}

/** Takes one event in, once: what has a number that was seen already is passed over. */
function take(event) {
  const data = JSON.parse(event.data);
  if (data.sequence_number <= current.seq) return;
  current.seq = data.sequence_number;
  if (data.type === "response.created") current.id = data.response.id;
  if (data.type === "response.output_text.delta") current.text += data.delta;
  if (data.type === "response.reasoning_text.delta") current.thought += data.delta;
  if (FINAL.has(data.type)) current.ended = true;
  save();
  render(describe(data));
}

function describe(data) {
  if (data.type === "error") return `Failed: ${data.message}`;
  const response = data.response;
  if (!response) return undefined;
  const tokens = response.usage ? `, ${response.usage.output_tokens} tokens` : "";
  if (response.status === "failed") return `Failed: ${response.error?.message ?? "no reason given"}`;
  return `${response.status.replace("_", " ")}${tokens} (${response.id})`;
}

async function start(event) {
  event.preventDefault();
  const prompt = $("prompt").value;
  current = { id: null, seq: -1, text: "", thought: "", prompt, ended: false };
  stopping = false;
  render("Sending …");
  const body = {
    model: $("model").value || undefined,
    input: prompt,
    max_output_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    background: true,
    stream: true,
  };
  const options = { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  try {
    await read(await ask("/v1/responses", options));
  } catch (error) {
    if (error instanceof Refused || current.id === null) return fail(error);
  }
  await follow();
}

async function read(response) {
  for await (const event of eventsOf(response)) take(event);
}

/** Reads on after the last event that was shown, through lost connections, until the end. */
async function follow() {
  for (let tries = 0; !current.ended; tries += 1) {
    const seen = current.seq;
    try {
      const after = seen >= 0 ? `&starting_after=${seen}` : "";
      await read(await ask(`/v1/responses/${current.id}?stream=true${after}`));
    } catch (error) {
      if (error instanceof Refused && error.status < 500) return fail(error);
      render("The connection was lost; trying again …");
    }
    if (current.seq > seen) tries = 0;
    if (!current.ended) await wait(RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]);
  }
}

function fail(error) {
  // Without a key the answer is only out of reach: the next key goes on with it.
  current.ended = error.status !== 401;
  save();
  render(`Failed: ${error.message}`);
}

async function stop() {
  if (!current || current.ended || stopping || !current.id) return;
  stopping = true;
  render("Stopping …");
  try {
    await ask(`/v1/responses/${current.id}/cancel`, { method: "POST" });
  } catch (error) {
    stopping = false;
    render(`Could not stop: ${error.message}`);
  }
}

async function resume() {
  try {
    current = JSON.parse(localStorage.getItem(SAVED));
  } catch {
    current = null;
  }
  if (!current) return render();
  $("prompt").value = current.prompt;
  if (current.ended || !current.id) {
    current.ended = true;
    return render("");
  }
  render("Going on …");
  await follow();
}

// --- begin ------------------------------------------------------------------------------------------------------------

$("key").value = sessionStorage.getItem(KEY) ?? "";
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  lookAtPool();
  listModels();
  if (current && current.id && current.ended === false) follow();
});
$("ask").addEventListener("submit", start);
$("stop").addEventListener("click", stop);
lookAtPool();
listModels();
setInterval(() => { if (!document.hidden) lookAtPool(); }, POLL_MS);
resume();
