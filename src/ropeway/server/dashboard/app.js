// The dashboard's page: asks once a second what the engine looks like, and draws it. No framework, nothing from
// elsewhere but the chart library that the server hands out.
"use strict";

const EVERY_MS = 1000, KEPT = 180;  // three minutes
const PARTS = [["queued_s", "#c9b458"], ["prefill_s", "#9ec5e8"], ["decode_s", "#1f6fb2"],
               ["preempted_s", "#b3261e"], ["swapped_s", "#e08a1e"], ["delivery_s", "#8a96a3"]];
const TRACKS = ["host", "compute", "communication"];
const at = id => document.getElementById(id);
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let key = sessionStorage.getItem("ropeway-key") || "";
let paused = false, before = null, chosen = null, talk = [];
const series = { time: [], tokens: [], prompts: [], running: [], waiting: [], kv: [],
                 ttft50: [], ttft99: [], itl50: [], itl99: [] };

function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = "Bearer " + key;
  return fetch(path, { ...options, headers });
}

function seconds(value) {
  if (value === null || !isFinite(value)) return "-";
  if (value < 1) return (value * 1000).toFixed(value < 0.01 ? 1 : 0) + " ms";
  if (value < 120) return value.toFixed(1) + " s";
  return value < 7200 ? Math.round(value / 60) + " min" : (value / 3600).toFixed(1) + " h";
}

// The quantile of what came into a histogram between two looks: its buckets are (upper bound, how many up to it).
function quantile(now, then, share) {
  const counts = now.map(([bound, count], i) => [bound, count - (then ? then[i][1] : 0)]);
  const total = counts.length ? counts[counts.length - 1][1] : 0;
  if (total <= 0) return null;
  let low = 0, below = 0;
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (bound === null) return low;  // the last one has no bound
      return count === below ? bound : low + (bound - low) * (share * total - below) / (count - below);
    }
    low = bound; below = count;
  }
  return low;
}

// ------------------------------------------------------------------ the parts of the page

function cells(row, values) {
  for (const value of values) {
    const cell = row.insertCell();
    if (value instanceof Node) cell.append(value); else cell.textContent = value;
  }
}

function fill(table, rows, make) {
  const body = document.createElement("tbody");
  for (const each of rows) make(body.insertRow(), each);
  at(table).tBodies[0].replaceWith(body);
}

function bar(seat) {
  const whole = document.createElement("div"), prompt = document.createElement("i"), done = document.createElement("i");
  whole.className = "bar";
  prompt.className = "prompt";
  prompt.style.width = 100 * Math.min(seat.prompt_tokens, seat.computed_tokens) / seat.limit + "%";
  done.style.width = 100 * Math.min(seat.computed_tokens, seat.limit) / seat.limit + "%";
  whole.append(done, prompt);
  return whole;
}

function showFigures(now) {
  const stats = now.stats, blocks = now.limits.num_blocks;
  const last = name => series[name].length ? series[name][series[name].length - 1] : null;
  at("model").textContent = now.model + ", version " + now.version;
  at("up").textContent = "up " + seconds(now.up_s) + (now.restarts ? ", engine restarted " + now.restarts + "x" : "");
  const status = now.failure ? "engine down" : now.draining ? "draining" : "serving";
  at("status").textContent = status;
  at("status").classList.toggle("bad", status !== "serving");
  const told = [now.failure, ...now.warnings].filter(Boolean);
  at("notice").hidden = !told.length;
  at("notice").textContent = told.join("; ");
  at("f-running").textContent = stats.running + " / " + now.limits.max_num_seqs;
  at("f-waiting").textContent = stats.waiting;
  at("f-tokens").textContent = last("tokens") === null ? "-" : last("tokens").toFixed(1);
  at("f-ttft").textContent = seconds(last("ttft50"));
  at("f-itl").textContent = seconds(last("itl50"));
  at("f-kv").textContent = (100 * stats.blocks_live / blocks).toFixed(1) + " %";
  at("f-hits").textContent = stats.prefix_queries ?
    (100 * stats.prefix_hits / stats.prefix_queries).toFixed(1) + " %" : "-";
  at("f-preempted").textContent = stats.preemptions;
}

function showBatch(now) {
  at("batch-note").textContent = now.seats.length + " of " + now.limits.max_num_seqs + " seats";
  fill("batch", now.seats, (row, seat) => cells(row, [
    seat.id, seat.tier, seat.prompt_tokens, seat.output_tokens, seat.blocks, seat.preemptions, bar(seat)]));
  const tiers = now.stats.tiers;
  fill("tiers", now.tiers, (row, name) => {
    const tier = tiers[name] || { running: 0, waiting: 0, swapped: 0, refused: {} };
    const refused = Object.values(tier.refused).reduce((sum, count) => sum + count, 0);
    cells(row, [name, tier.running, tier.waiting, tier.swapped, refused]);
  });
  fill("queue", now.queue, (row, each) => cells(row, [
    each.id, each.tier, each.prompt_tokens, seconds(each.waits_s),
    each.gated ? "gate" : each.swapped ? "seat (swapped)" : "seat"]));
}

function showBlocks(now) {
  const canvas = at("blocks"), count = now.blocks.length;
  if (!count) return;
  const columns = Math.ceil(Math.sqrt(count * canvas.width / canvas.height));
  const rows = Math.ceil(count / columns), pen = canvas.getContext("2d");
  const colours = [style("--free"), style("--cached"), style("--live"), style("--shared")];
  const width = canvas.width / columns, height = canvas.height / rows, gap = width > 5 ? 1 : 0;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < count; i++) {
    pen.fillStyle = colours[+now.blocks[i]];
    pen.fillRect((i % columns) * width, Math.floor(i / columns) * height, width - gap, height - gap);
  }
  const stats = now.stats;
  at("blocks-note").textContent = stats.blocks_live + " live, " + stats.blocks_cached + " cached, " +
    stats.blocks_free + " free, of " + now.limits.block_size + " tokens each";
}

function showRequests(now) {
  fill("requests", now.requests, (row, each) => {
    const id = document.createElement("code");
    id.textContent = each.id;
    cells(row, [id, each.tier, seconds(each.age_s), each.error || (each.ended ? "ended" : "under way")]);
    row.classList.toggle("chosen", each.id === chosen);
    row.onclick = () => { chosen = each.id; tellStory(); };
  });
}

async function tellStory() {
  if (!chosen) return;
  const answer = await ask("/dashboard/requests/" + encodeURIComponent(chosen)), story = at("story");
  if (!answer.ok) { story.textContent = "It is not remembered any more."; return; }
  const told = await answer.json(), strip = document.createElement("div"), list = document.createElement("dl");
  strip.className = "parts";
  for (const [name, colour] of PARTS) {
    const part = document.createElement("i");
    part.style.width = 100 * told.parts[name] / Math.max(told.e2e_s, 1e-9) + "%";
    part.style.background = colour;
    part.title = name.replace("_s", "") + " " + seconds(told.parts[name]);
    strip.append(part);
  }
  const lines = [["id", told.id], ["phase", told.phase + (told.error ? " (" + told.error + ")" : "")],
    ["in all", seconds(told.e2e_s)],
    ...PARTS.map(([name]) => [name.replace("_s", ""), seconds(told.parts[name])]),
    ["waited for", Object.entries(told.waits_s).map(([why, s]) => why + " " + seconds(s)).join(", ") || "nothing"],
    ["preempted", Object.entries(told.preemptions).map(([how, n]) => n + "x by " + how).join(", ") || "never"],
    ["tokens", told.prompt_tokens + " in (" + told.cached_tokens + " cached), " + told.output_tokens + " out"]];
  for (const [name, value] of lines) {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    list.append(term, text);
  }
  story.replaceChildren(strip, list);
}

// ------------------------------------------------------------------ charts

const layout = (title, unit) => ({
  title: { text: title, font: { size: 13 } }, margin: { l: 48, r: 12, t: 28, b: 28 }, showlegend: true,
  legend: { orientation: "h", x: 1, xanchor: "right", y: 1.18, font: { size: 11 } },
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--dim") },
  xaxis: { type: "date", gridcolor: style("--line") },
  yaxis: { rangemode: "tozero", gridcolor: style("--line"), title: { text: unit, font: { size: 11 } } } });

function draw(id, title, unit, lines) {
  const data = lines.map(([name, field]) => ({
    name, x: [...series.time], y: [...series[field]], mode: "lines", connectgaps: false, line: { width: 1.6 } }));
  Plotly.react(id, data, layout(title, unit), { displayModeBar: false, responsive: true });
}

function drawAll() {
  draw("c-throughput", "Throughput", "tokens/s", [["output", "tokens"], ["prompts", "prompts"]]);
  draw("c-load", "Requests", "", [["running", "running"], ["waiting", "waiting"]]);
  draw("c-ttft", "Time to first token", "s", [["P50", "ttft50"], ["P99", "ttft99"]]);
  draw("c-itl", "Inter-token latency", "s", [["P50", "itl50"], ["P99", "itl99"]]);
}

function note(now) {
  const then = before || now, passed = now.up_s - then.up_s;  // the wall's clock may jump
  const rate = name => passed > 0 ? (now.tokens[name] - then.tokens[name]) / passed : null;
  const of = (name, share) => before ? quantile(now.latencies[name], then.latencies[name], share) : null;
  const point = { time: new Date(now.now_s * 1000), tokens: rate("generation"), prompts: rate("prompt"),
    running: now.stats.running, waiting: now.stats.waiting, kv: now.stats.blocks_live / now.limits.num_blocks,
    ttft50: of("ttft", 0.5), ttft99: of("ttft", 0.99), itl50: of("itl", 0.5), itl99: of("itl", 0.99) };
  for (const [name, values] of Object.entries(series)) {
    values.push(point[name]);
    if (values.length > KEPT) values.shift();
  }
  before = now;
}

// ------------------------------------------------------------------ the timeline

async function record() {
  const button = at("record");
  button.disabled = true;
  at("timeline-note").textContent = "recording";
  try {
    const answer = await ask("/dashboard/timeline?seconds=2");
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    drawTimeline(((await answer.json()).traceEvents || []).filter(each => each.ph === "X" && each.pid === 0));
  } catch (error) {
    at("timeline-note").textContent = String(error.message || error);
  }
  button.disabled = false;
}

function drawTimeline(events) {
  const canvas = at("timeline"), pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  if (!events.length) { at("timeline-note").textContent = "nothing ran"; return; }
  const begin = Math.min(...events.map(each => each.ts)), end = Math.max(...events.map(each => each.ts + each.dur));
  const names = [...new Set(events.map(each => each.name))], left = 110, height = canvas.height / TRACKS.length;
  const colours = ["#1f6fb2", "#9ec5e8", "#e08a1e", "#26804a", "#c9b458", "#8a5bb0", "#b3261e", "#8a96a3"];
  const x = time => left + (canvas.width - left) * (time - begin) / Math.max(end - begin, 1);
  TRACKS.forEach((track, row) => {
    pen.fillStyle = style("--dim");
    pen.font = "13px sans-serif";
    pen.fillText(track, 6, row * height + height / 2 + 4);
  });
  for (const each of events) {
    pen.fillStyle = colours[names.indexOf(each.name) % colours.length];
    pen.fillRect(x(each.ts), each.tid * height + 8, Math.max(x(each.ts + each.dur) - x(each.ts), 1), height - 16);
  }
  at("timeline-note").textContent = seconds((end - begin) / 1e6) + ": " + names.join(", ");
}

// ------------------------------------------------------------------ the chat

function line(role, text) {
  const paragraph = document.createElement("p");
  paragraph.className = role;
  paragraph.textContent = text;
  at("talk").append(paragraph);
  return paragraph;
}

async function say(event) {
  event.preventDefault();
  const text = at("say").value.trim();
  if (!text) return;
  at("say").value = "";
  talk.push({ role: "user", content: text });
  line("user", text);
  const shown = line("assistant", "");
  try {
    const answer = await ask("/v1/chat/completions", { method: "POST",
      headers: { "content-type": "application/json" }, body: JSON.stringify({ messages: talk, stream: true }) });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    let rest = "", said = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const each of lines) {
        if (!each.startsWith("data: ") || each === "data: [DONE]") continue;
        const chunk = JSON.parse(each.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        said += chunk.choices[0]?.delta?.content || "";
        shown.textContent = said;
      }
      at("talk").scrollTop = at("talk").scrollHeight;
    }
    talk.push({ role: "assistant", content: said });
  } catch (error) {
    shown.textContent = "(" + (error.message || error) + ")";
    talk.pop();
  }
}

// ------------------------------------------------------------------ the loop

async function look() {
  try {
    const answer = await ask("/dashboard/now");
    at("key-form").hidden = answer.status !== 401 && answer.status !== 403;
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const now = await answer.json();
    note(now);
    showFigures(now);
    showBatch(now);
    showBlocks(now);
    showRequests(now);
    drawAll();
  } catch (error) {
    at("status").textContent = String(error.message || error);
    at("status").classList.add("bad");
  }
}

async function turn() {
  if (!paused) {
    await look();
    await tellStory();
  }
  setTimeout(turn, EVERY_MS);
}

at("pause").onclick = () => { paused = !paused; at("pause").textContent = paused ? "Go on" : "Pause"; };
at("record").onclick = record;
at("chat").onsubmit = say;
at("key-form").onsubmit = event => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("ropeway-key", key);
  look();
};
turn();
