// The view for studying: the order of the embeddings beside the re-ranked order, times, and the parts of the scores.
import { WEAK, byId, captionOf, nameOf, showThumbnail } from "/api.js";

const SHOWN = 12;
const SIDE = 256;
const PART_NAMES = {
  logit: "logit",
  late: "late interaction",
  pooled: "pooled similarity",
  embedding: "embedding similarity",
};

let isTrained = false;
let last = null; // the latest answer, with what was asked

export function showFormula(index) {
  isTrained = index.trained;
  byId("formula").textContent =
    `Score = ${index.score}. It orders the hits of one query. The relevance, from 0 to 1, says how strongly the score speaks for a match; below ${WEAK}, a match is weak.`;
}

export function compare(result, asked, milliseconds) {
  const isRanked = result.by_embedding !== null;
  const first = result.hits.slice(0, SHOWN);
  byId("before-section").hidden = !isRanked;
  byId("orders").classList.toggle("single", !isRanked);
  const found = first.length ? "Photos by embedding" : "No photos";
  byId("after-title").textContent = isRanked ? `Re-ranked with ${result.precision} tokens` : found;
  byId("before").replaceChildren(...(result.by_embedding ?? []).slice(0, SHOWN).map((hit) => card(hit, result, "before")));
  const cards = first.map((hit) => card(hit, result, isRanked ? "after" : "single"));
  const weak = isRanked && isTrained ? first.findIndex((hit) => hit.relevance < WEAK) : -1;
  if (weak >= 0) cards.splice(weak, 0, divider());
  byId("after").replaceChildren(...cards);
  byId("timing").textContent = times(result.timing, milliseconds);
  byId("changes").textContent = isRanked ? changes(result, asked) : "";
  last = { asked, result };
}

function divider() {
  const item = document.createElement("li");
  item.className = "weak";
  item.textContent = "Weak matches from here";
  return item;
}

function times({ waited_ms, computed_ms, stages_ms }, milliseconds) {
  const network = Math.max(0, milliseconds - waited_ms - computed_ms);
  const stages = Object.entries(stages_ms).filter(([name]) => name !== "total");
  const texts = stages.map(([name, value]) => `${name.replace("_", " ")} ${value.toFixed(1)} ms`);
  return (
    `${Math.round(milliseconds)} ms: ${Math.round(waited_ms)} ms in the queue, ` +
    `${Math.round(computed_ms)} ms search and re-ranking, ${Math.round(network)} ms network. Stages: ${texts.join(", ")}.`
  );
}

function changes(result, asked) {
  const first = result.hits.slice(0, SHOWN);
  const entered = first.filter((hit) => hit.embedding_rank > SHOWN).length;
  const stayed = first.filter((hit) => hit.rank === hit.embedding_rank).length;
  let text = `Of the first ${first.length}, ${stayed} kept their rank and ${entered} came from further down.`;
  if (last && last.asked.query === asked.query && last.result.precision !== result.precision) {
    const known = last.result.hits.map((hit) => hit.row_id);
    const moved = first.filter((hit, position) => known[position] !== hit.row_id).length;
    text += ` With ${result.precision} instead of ${last.result.precision}, ${moved} of ${first.length} ranks hold another photo.`;
  }
  return text;
}

function card(hit, result, kind) {
  const item = byId("hit").content.firstElementChild.cloneNode(true);
  const inside = (selector) => item.querySelector(selector);
  inside(".rank").textContent = kind === "before" ? hit.embedding_rank : hit.rank;
  inside(".name").textContent = nameOf(hit);
  inside(".name").title = hit.uri;
  inside(".columns").textContent = captionOf(hit);
  inside(".facts").textContent = `row ${hit.row_id}, cosine ${hit.embedding_score.toFixed(4)}`;
  inside("img").alt = nameOf(hit);
  showThumbnail(inside("img"), hit.row_id, SIDE);
  if (kind !== "single") showMovement(inside(".movement"), hit, kind);
  if (kind === "after") showParts(inside(".parts"), hit, result.weights);
  return item;
}

function showMovement(element, hit, kind) {
  const moved = hit.embedding_rank - hit.rank;
  const badge = document.createElement("span");
  badge.className = moved > 0 ? "up" : moved < 0 ? "down" : "soft";
  badge.textContent = moved > 0 ? `▲ up ${moved}` : moved < 0 ? `▼ down ${-moved}` : "= stays";
  element.append(kind === "before" ? `re-ranked to ${hit.rank} ` : `by embedding ${hit.embedding_rank} `, badge);
}

function showParts(details, hit, weights) {
  details.hidden = false;
  details.querySelector("summary").textContent = `${hit.relevance === null ? "" : `relevance ${hit.relevance.toFixed(2)}, `}score ${hit.score.toFixed(2)}`;
  const rows = Object.entries(weights).map(([part, weight]) => {
    const row = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = PART_NAMES[part] ?? part;
    row.append(name);
    row.insertCell().textContent = hit.parts[part]?.toFixed(4) ?? "not computed";
    row.insertCell().textContent = `x ${Number(weight.toPrecision(4))}`;
    return row;
  });
  details.querySelector("tbody").replaceChildren(...rows);
}
