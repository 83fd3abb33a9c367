"use strict";
// The conversation. What the model or the server says reaches the page as text nodes only.
(() => {
  const el = (id) => document.getElementById(id);
  const log = el("log"), prompt = el("prompt"), controls = el("controls"), tip = el("tip");
  const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty"];
  const ALTERNATIVES = 5;
  let conversation = [];
  let running = null;

  window.jaxserve = {
    headers() {
      const key = el("api-key").value.trim();
      return key ? { Authorization: `Bearer ${key}` } : {};
    },
    async failure(response) {
      try {
        return (await response.json()).error.message;
      } catch {
        return `the server answers ${response.status}`;
      }
    },
  };

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function addMessage(role, text) {
    el("empty")?.remove();
    const message = make("article", `message ${role}`);
    message.append(make("h3", "", role === "user" ? "You" : "Model"));
    const body = make("div", "text", text);
    message.append(body);
    log.append(message);
    log.scrollTop = log.scrollHeight;
    return { message, body };
  }

  function requestBody(coloured) {
    const body = { messages: [...conversation], stream: true, stream_options: { include_usage: true } };
    const system = controls.elements.system.value.trim();
    if (system) body.messages.unshift({ role: "system", content: system });
    for (const name of NUMBERS) {
      const text = controls.elements[name].value;
      if (text !== "") body[name] = Number(text);
    }
    const stop = controls.elements.stop.value.split("\n").filter(Boolean);
    if (stop.length) body.stop = stop;
    if (coloured) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    return body;
  }

  async function* events(response) {
    const decoder = new TextDecoder();
    let rest = "";
    for (const reader = response.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
      }
    }
  }

  // A token's span; a character cut between tokens belongs to the token that completes it.
  function tokenWriter(body) {
    const decoder = new TextDecoder();
    let shown = 0;
    const spans = [];
    return {
      add(entry) {
        const bytes = new Uint8Array(entry.bytes ?? new TextEncoder().encode(entry.token));
        const probability = Math.exp(entry.logprob);
        const span = make("span", `token p${Math.min(4, Math.floor(probability * 5))}`, decoder.decode(bytes, { stream: true }));
        span.entry = entry;
        shown += span.textContent.length;
        spans.push(span);
        body.append(span);
      },
      // Tokens that are no text, such as the end of the turn, are taken back.
      finish(length) {
        while (spans.length && shown > length) {
          const span = spans.pop();
          shown -= span.textContent.length;
          span.remove();
        }
      },
    };
  }

  async function send() {
    const text = prompt.value.trim();
    if (!text || running) return;
    prompt.value = "";
    const turns = conversation; // "Clear" begins another one
    turns.push({ role: "user", content: text });
    addMessage("user", text);
    const coloured = el("colour").checked;
    const { message, body } = addMessage("assistant", "");
    message.classList.add("running");
    const meta = make("p", "meta", "");
    message.append(meta);
    running = new AbortController();
    setRunning(true);
    const began = performance.now();
    const answer = { text: "", firstAt: 0, lastAt: 0, tokens: 0, finish: "" };
    const tokens = coloured ? tokenWriter(body) : null;
    try {
      await read(requestBody(coloured), running.signal, (chunk) => {
        const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
        take(chunk, answer, body, tokens);
        if (follows) log.scrollTop = log.scrollHeight;
      });
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else {
        const failure = make("p", "error", error.message);
        failure.setAttribute("role", "alert");
        message.append(failure);
      }
    }
    tokens?.finish(answer.text.length);
    meta.textContent = told(answer, began);
    message.classList.remove("running");
    // What failed at once is taken out, so that the next message does not carry it on.
    if (answer.text) turns.push({ role: "assistant", content: answer.text });
    else turns.pop();
    running = null;
    setRunning(false);
    log.scrollTop = log.scrollHeight;
    prompt.focus();
  }

  async function read(body, signal, take) {
    const headers = { "Content-Type": "application/json", ...window.jaxserve.headers() };
    const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error(await window.jaxserve.failure(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(chunk);
    }
  }

  function take(chunk, answer, body, tokens) {
    if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const added = choice.delta?.content ?? "";
    if (added || choice.logprobs) {
      answer.lastAt = performance.now();
      answer.firstAt ||= answer.lastAt;
    }
    answer.text += added;
    if (tokens) for (const entry of choice.logprobs?.content ?? []) tokens.add(entry);
    else if (added) body.append(added);
    if (choice.finish_reason) answer.finish = choice.finish_reason;
  }

  function told(answer, began) {
    const parts = [];
    if (answer.tokens) parts.push(`${answer.tokens} tokens`);
    if (answer.firstAt) parts.push(`first after ${Math.round(answer.firstAt - began)} ms`);
    const seconds = (answer.lastAt - answer.firstAt) / 1000;
    if (answer.tokens > 1 && seconds > 0) parts.push(`${((answer.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (answer.finish) parts.push(answer.finish);
    return parts.join(" · ");
  }

  function setRunning(is) {
    el("send").disabled = is;
    el("stop").disabled = !is;
    log.setAttribute("aria-busy", String(is));
  }

  function row(text, logprob, className) {
    const line = make("div", className);
    const shown = JSON.stringify(text).slice(1, -1);
    line.append(make("code", "", shown || "(part of a character)"), make("span", "", percent(logprob)));
    return line;
  }

  function percent(logprob) {
    const share = 100 * Math.exp(logprob);
    return share >= 0.05 || share === 0 ? `${share.toFixed(1)} %` : "< 0.1 %";
  }

  function showTip(span) {
    const { token, logprob, top_logprobs: others } = span.entry;
    tip.replaceChildren(row(token, logprob, "chosen"));
    for (const other of others ?? []) if (other.token !== token) tip.append(row(other.token, other.logprob, ""));
    tip.hidden = false;
    const place = span.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const below = place.bottom + size.height + 8 < window.innerHeight;
    tip.style.left = `${Math.max(4, Math.min(place.left, window.innerWidth - size.width - 4))}px`;
    tip.style.top = `${below ? place.bottom + 6 : place.top - size.height - 6}px`;
  }

  log.addEventListener("mouseover", (event) => {
    if (event.target.entry) showTip(event.target);
    else tip.hidden = true;
  });
  log.addEventListener("mouseleave", () => { tip.hidden = true; });
  log.addEventListener("scroll", () => { tip.hidden = true; });
  // By keyboard: arrows go from token to token while the conversation has the focus.
  let current = null;
  log.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") tip.hidden = true;
    if (!step) return;
    const all = [...log.querySelectorAll(".token")];
    if (!all.length) return;
    const index = all.indexOf(current) + step;
    current = all[Math.max(0, Math.min(all.length - 1, index))];
    showTip(current);
    event.preventDefault();
  });
  log.addEventListener("blur", () => { tip.hidden = true; });

  el("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  controls.addEventListener("submit", (event) => event.preventDefault());
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  el("stop").addEventListener("click", () => running?.abort());
  el("clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    log.replaceChildren();
    prompt.focus();
  });
})();
