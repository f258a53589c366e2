"""What the demo says, in the language of its world."""

from pathlib import Path

CHINESE = {
    "base model": "基础模型与数据",
    "warm start by supervised fine-tuning": "有监督微调热身",
    "retriever": "检索服务",
    "retriever answers at": "检索服务的地址：",
    "with real searches": "强化学习，真实检索",
    "report": "报告",
    "steps": "步",
    "seed": "随机种子",
    "exact match and searches per question, by step": "每一步的精确匹配与每题检索次数",
    "held-out questions": "留出的问题",
    "greedy": "贪心解码",
    "exact match": "精确匹配",
    "after the warm start": "热身之后",
    "after reinforcement learning": "强化学习之后",
    "… one search needed": "… 需要一次检索",
    "… two searches needed": "… 需要两次检索",
    "… with an empty retriever": "… 检索服务为空时",
    "Searches per question": "每题检索次数",
    "wall time": "总用时",
    "phase": "阶段",
    "time": "用时",
    "The same held-out questions, before and after": "同样的留出问题：训练前与训练后",
    "gold": "标准答案",
    "before": "训练前",
    "after": "训练后",
    "Learning curve": "学习曲线",
    "Learning curve in a browser": "在浏览器里查看学习曲线",
    "Model": "模型",
    "Checkpoint to resume from": "可继续训练的检查点",
    "Ask it (start the retriever first, in another terminal)": "提问（先在另一个终端启动检索服务）",
}
"""By their English words, as the pages have them."""

QUESTIONS = {
    "en": "What is the calling code of Ghana?",
    "zh": "加纳的国际区号是多少？",
    "hard": "Which calling code does the country of Ligol Museum use?",
}
"""What the report suggests to ask in each world."""


def say(world: str, text: str) -> str:
    """Return a text in the language of a world: Chinese for zh, else English."""
    return CHINESE[text] if world == "zh" else text


def ask_with(world: str, out: Path) -> tuple[str, str]:
    """Return the commands that serve the demo's corpus and ask its model."""
    serve = "bash retrieval_launch.sh"
    if world != "en":
        serve = f"CORPUS_PATH={out / 'data' / 'corpus.jsonl'} {serve}"
    return serve, f'.venv/bin/python infer.py "{QUESTIONS[world]}" --model {out / "model"}'
