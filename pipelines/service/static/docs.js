// Lists the routes of /openapi.json with their parameters. Everything is shown as text.
import { ask, byId } from "/api.js";

function element(name, ...content) {
  const node = document.createElement(name);
  node.append(...content);
  return node;
}

// Shows text in backticks as code.
function prose(text) {
  return text.split("`").map((part, number) => (number % 2 ? element("code", part) : part));
}

function typeOf(schema, schemas) {
  if (schema.$ref) return typeOf(schemas[schema.$ref.split("/").pop()], schemas);
  const kinds = schema.anyOf ?? schema.oneOf;
  if (kinds) return kinds.map((kind) => typeOf(kind, schemas)).filter((kind) => kind !== "null").join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {}, schemas)}`;
  if (schema.type === "object" && schema.title) return `${schema.title} (object)`;
  return schema.type ?? "any";
}

function table(label, rows) {
  const cells = (name, texts) => element("tr", ...texts.map((text) => element(name, ...prose(text))));
  const head = cells("th", ["name", "type", "default", "description"]);
  const box = element("div", element("table", element("caption", label), head, ...rows.map((row) => cells("td", row))));
  box.className = "scroll";
  box.tabIndex = 0;
  return box;
}

function describe(name, schema, isRequired, description, schemas) {
  const standard = schema.default == null ? "" : JSON.stringify(schema.default);
  return [name, typeOf(schema, schemas), isRequired ? "required" : standard, description ?? schema.description ?? ""];
}

function route(path, method, operation, schemas) {
  const section = element("section", element("h2", `${method.toUpperCase()} ${path}`), element("p", ...prose(operation.description ?? operation.summary ?? "")));
  const parameters = (operation.parameters ?? []).map((each) => describe(each.name, each.schema, each.required, each.description, schemas));
  if (parameters.length) section.append(table("Parameters", parameters));
  const body = operation.requestBody?.content["application/json"].schema;
  for (const { $ref } of body ? (body.oneOf ?? [body]) : []) {
    const schema = schemas[$ref.split("/").pop()];
    const members = Object.entries(schema.properties).map(([name, member]) =>
      describe(name, member, schema.required?.includes(name), member.description, schemas),
    );
    section.append(element("p", ...prose(schema.description ?? "")), table(`JSON body: ${schema.title}`, members));
  }
  return section;
}

try {
  const { paths, components } = await (await ask("/openapi.json")).json();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) byId("routes").append(route(path, method, operation, components.schemas));
  }
} catch (error) {
  byId("status").textContent = error.status === 401 ? "Enter the API key on the search page first, in this tab." : error.message;
}
