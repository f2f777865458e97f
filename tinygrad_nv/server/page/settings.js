// Sampling parameters, the system message and the model: kept in the browser. An empty field is the default.

import { $, make } from "./dom.js";
import { read, write } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"];
const FIELDS = [...NUMBERS, "stop_strings", "reasoning_effort", "system"];
const EFFORTS = { none: "off", xhigh: "very high" };
let cards = [];      // of /v1/models

export function setUp(changed) {
  const kept = read("settings", {});
  for (const name of FIELDS) {
    if (typeof kept[name] === "string") $(name).value = kept[name];
    $(name).addEventListener("input", () => { $(name).removeAttribute("aria-invalid"); keep(); });
  }
  $("model").addEventListener("change", () => { write("model", $("model").value); efforts(); changed(); });
  $("reset").addEventListener("click", () => {
    for (const name of FIELDS) { $(name).value = ""; $(name).removeAttribute("aria-invalid"); }
    write("settings", null);
    keep();
    $("temperature").focus();
  });
  keep();
}

function keep() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, $(name).value]));
  // a model without efforts leaves the choice for others as it is
  if ($("effort-row").hidden) values.reasoning_effort = read("settings", {}).reasoning_effort ?? "";
  write("settings", values);
  $("reset").disabled = !Object.values(values).some(Boolean);
}

// The fields of a request; `system` besides.
export function settings() {
  const out = {};
  for (const name of NUMBERS) if ($(name).value !== "") out[name] = Number($(name).value);
  // "\n" stands for a new line
  const lines = $("stop_strings").value.split("\n").filter(Boolean);
  const stop = lines.map((text) => text.replaceAll("\\n", "\n"));
  if (stop.length) out.stop = stop;
  if ($("reasoning_effort").value) out.reasoning_effort = $("reasoning_effort").value;
  if ($("system").value.trim()) out.system = $("system").value.trim();
  return out;
}

// Marks the field that the server refuses, if there is one.
export function blame(param) {
  const name = param === "stop" ? "stop_strings" : param;
  const field = FIELDS.includes(name) ? $(name) : null;
  field?.setAttribute("aria-invalid", "true");
}

export const chosen = () => cards.find((card) => card.id === $("model").value);

// Offers the models that the server has, adapters apart.
export function offer(list) {
  cards = list;
  const before = $("model").value || read("model");
  const group = (label, some) => some.length
    ? [make("optgroup", { label }, ...some.map((card) => new Option(card.id)))] : [];
  const adapters = list.filter((card) => card.parent);
  $("model").replaceChildren(...(adapters.length
    ? [...group("Model", list.filter((card) => !card.parent)), ...group("Adapters", adapters)]
    : list.map((card) => new Option(card.id))));
  if (list.some((card) => card.id === before)) $("model").value = before;
  efforts();
}

function efforts() {
  const known = chosen()?.reasoning_efforts ?? [], before = read("settings", {}).reasoning_effort;
  // a switch knows only off and on
  const words = known.length === 2 && known[0] === "none" ? { none: "off", [known[1]]: "on" } : EFFORTS;
  const options = known.map((each) => new Option(words[each] ?? each, each));
  $("reasoning_effort").replaceChildren(new Option("default", ""), ...options);
  $("reasoning_effort").value = known.includes(before) ? before : "";
  $("effort-row").hidden = !known.length;
}
