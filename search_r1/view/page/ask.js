// Requests to the server.

import { say } from "./texts.js";

let token = ""; // in memory only

export class Unauthorized extends Error {}

export function useToken(text) {
  token = text;
}

/** Return the answer to GET /api/`name`. Throws Unauthorized without the token, else Error. */
export async function ask(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== "" && item !== null && item !== undefined) query.append(key, item);
    }
  }
  return request(`api/${name}?${query}`);
}

/** Return the answer to POST /api/`name`. Throws as `ask` does. */
export function send(name, body) {
  return request(`api/${name}`, { method: "POST", body: JSON.stringify(body) }, { "Content-Type": "application/json" });
}

async function request(url, options = {}, headers = {}) {
  let answer;
  try {
    const allHeaders = token ? { ...headers, Authorization: `Bearer ${token}` } : headers;
    answer = await fetch(url, { ...options, headers: allHeaders, cache: "no-store" });
  } catch {
    throw new Error(say("The server cannot be reached. Is it still running?"));
  }
  if (answer.status === 401) throw new Unauthorized();
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(errorText(body.detail) || say("The server answered with status {status}.", { status: answer.status }));
  return body;
}

function errorText(detail) {
  if (Array.isArray(detail)) return detail.map((item) => `${(item.loc ?? []).slice(1).join(" ")}: ${item.msg}`).join("; ");
  return detail;
}
