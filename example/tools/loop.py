"""An agent written against the openai client, which knows nothing of training.

python -m verl.trainer.main_ppo agent.name=loop:example/tools/loop.py:run template=native …
"""

import json

import httpx
from openai import AsyncOpenAI

QUERY = {"query": {"type": "string", "description": "What to look for."}}
PARAMETERS = {"type": "object", "properties": QUERY, "required": ["query"]}
ABOUT = "Searches a collection of documents and gives the best passages."
FUNCTION = {"name": "search", "description": ABOUT, "parameters": PARAMETERS}
SEARCH = {"type": "function", "function": FUNCTION}
SYSTEM = "Answer the question, with the tool if you need it. End with <answer> and </answer>."


async def run(client: AsyncOpenAI, question: str) -> None:
    """Play one episode; the reward reads the answer from the last message."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while True:
        reply = await client.chat.completions.create(model="any", messages=messages, tools=[SEARCH])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            found = await search(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


async def search(query: str = "", **other: object) -> str:
    """Ask the document server of this machine."""
    async with httpx.AsyncClient(trust_env=False) as http:
        body = {"queries": [str(query)], "topk": 3}
        answer = await http.post("http://127.0.0.1:8000/retrieve", json=body)
    return "\n".join(
        document["contents"] for document in answer.raise_for_status().json()["result"][0]
    )
