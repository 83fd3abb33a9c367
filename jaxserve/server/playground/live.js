"use strict";
// The engine's state, asked for about once a second and only while somebody can see it.
(() => {
  const el = (id) => document.getElementById(id);
  const PERIOD_MS = 1000, RETRY_ROUNDS = 4, ITERATIONS = 96, ROWS = 32;
  const panel = el("live"), grid = el("grid");
  let before = null, asking = false, skip = 0;

  const whole = (number) => number.toLocaleString("en");
  const isSeen = () => document.visibilityState === "visible";

  async function poll() {
    if (!isSeen() || asking) return;
    asking = true;
    try {
      const count = panel.open ? ITERATIONS : 0;
      const response = await fetch(`/debug/state?iterations=${count}`, { headers: window.jaxserve.headers() });
      if (response.ok) show(await response.json());
      else hide(await window.jaxserve.failure(response), response.status);
    } catch {
      hide("the server does not answer", 0);
    }
    asking = false;
  }

  function hide(reason, status) {
    before = null;
    skip = RETRY_ROUNDS;
    el("live-body").hidden = true;
    el("live-note").textContent = reason;
    el("model").textContent = status === 401 ? "enter the API key" : status === 403 ? "connected" : reason;
  }

  function show(state) {
    el("live-note").textContent = "";
    el("live-body").hidden = false;
    el("model").textContent = `${state.model} · ${state.state} · context ${whole(state.max_model_len)}`;
    el("f-running").textContent = `${state.num_requests_running} / ${state.max_num_seqs}`;
    el("f-waiting").textContent = whole(state.num_requests_waiting);
    el("f-preemptions").textContent = whole(state.totals.preemptions);
    rates(state);
    pages(state.kv);
    if (panel.open) {
      draw(state);
      slots(state);
      queue(state);
    }
  }

  function rates(state) {
    const now = { at: performance.now(), ...state.totals };
    if (before && now.iterations >= before.iterations) {
      const seconds = (now.at - before.at) / 1000;
      for (const name of ["prefill", "decode"]) {
        const rate = (now[`${name}_tokens`] - before[`${name}_tokens`]) / seconds;
        el(`f-${name}`).textContent = rate < 10 && rate > 0 ? rate.toFixed(1) : whole(Math.round(rate));
      }
    }
    before = now;
    const asked = now.prefix_cache_queries;
    el("f-hits").textContent = asked ? `${Math.round((100 * now.prefix_cache_hits) / asked)} %` : "–";
  }

  function pages(kv) {
    el("kv-owned").style.width = `${(100 * kv.pages_owned) / kv.pages_total}%`;
    el("kv-cached").style.width = `${(100 * kv.pages_cached) / kv.pages_total}%`;
    const text = `${whole(kv.pages_owned)} + ${whole(kv.pages_cached)} of ${whole(kv.pages_total)} pages, ${kv.page_size} tokens each`;
    el("kv-text").textContent = text;
    el("kv").setAttribute("aria-label", `KV pages: ${kv.pages_owned} owned, ${kv.pages_cached} cached, ${kv.pages_free} free`);
  }

  function draw(state) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name);
    const rows = state.max_num_seqs;
    const height = Math.max(2, Math.min(14, Math.floor(288 / rows)));
    const ratio = window.devicePixelRatio || 1, width = grid.clientWidth;
    grid.width = Math.round(width * ratio);
    grid.height = Math.round(height * rows * ratio);
    grid.style.height = `${height * rows}px`;
    const pen = grid.getContext("2d");
    pen.scale(ratio, ratio);
    const step = width / ITERATIONS, gap = height > 4 ? 1 : 0;
    pen.fillStyle = colour("--idle");
    for (let slot = 0; slot < rows; slot++) pen.fillRect(0, slot * height, width, height - gap);
    const first = ITERATIONS - state.iterations.length;
    const cell = (slot, index) => pen.fillRect((first + index) * step, slot * height, Math.max(1, step - 0.5), height - gap);
    pen.fillStyle = colour("--decode");
    state.iterations.forEach((iteration, index) => iteration.decode.forEach((slot) => cell(slot, index)));
    pen.fillStyle = colour("--prefill");
    state.iterations.forEach((iteration, index) => iteration.prefill.forEach(([slot]) => cell(slot, index)));
    const last = state.iterations.at(-1);
    el("grid-text").textContent = last ? `${state.iterations.length} iterations, the last of ${(1000 * last.duration_s).toFixed(1)} ms` : "";
    grid.setAttribute("aria-label", `${state.slots.length} of ${rows} slots are held; the table below lists them`);
  }

  function row(cells) {
    const line = document.createElement("tr");
    cells.forEach((text, index) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (index === 1) {
        cell.className = "id";
        cell.title = text;
      }
      line.append(cell);
    });
    return line;
  }

  function slots(state) {
    const rows = state.slots.slice(0, ROWS).map((slot) => row([
      slot.slot,
      slot.request_id,
      slot.phase,
      `${slot.prompt_tokens}+${slot.output_tokens} / ${slot.prompt_tokens + slot.max_tokens}`,
      slot.pages,
      `${slot.age_s.toFixed(1)} s`,
    ]));
    const more = state.slots.length - rows.length;
    if (more > 0) rows.push(row(["", `and ${more} more`, "", "", "", ""]));
    if (!rows.length) rows.push(row(["–", "no slot is held", "", "", "", ""]));
    el("slots").replaceChildren(...rows);
  }

  function queue(state) {
    const oldest = state.queue[0];
    el("queue").textContent = oldest
      ? `${whole(state.num_requests_waiting)} waiting with ${whole(state.waiting_tokens)} tokens; the oldest for ${oldest.age_s.toFixed(1)} s`
      : "";
  }

  // A server that does not answer, or not yet, is asked less often.
  setInterval(() => (skip > 0 ? skip-- : poll()), PERIOD_MS);
  document.addEventListener("visibilitychange", poll);
  panel.addEventListener("toggle", poll);
  el("api-key").addEventListener("change", poll);
  poll();
})();
