"""The published scores of Search-R1 (Jin et al. 2025, arXiv 2503.09516 version 5, table 2).

The models are Qwen2.5, trained on NQ and HotpotQA; the corpus is wiki-18 with the retriever E5 and
three passages per search.
"""

SETS = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
"""`data_source` of each set, and its name in the paper."""
NOTE = (
    "Beside the paper's EM (Qwen2.5, wiki-18, E5, topk 3); figures of another model, corpus or "
    "retriever cannot be compared with it"
)
ROW_OF = {
    "direct": "direct",
    "cot": "chain of thought",
    "ircot": "IRCoT",
    "rag": "RAG",
    "agent": "Search-R1, instruct",
}
"""By method of an evaluation: the row below which it stands, unless its folder names another."""
EXACT_MATCH: dict[str, dict[str, tuple[float, ...]]] = {
    "7B": {
        "direct": (0.134, 0.408, 0.14, 0.183, 0.25, 0.031, 0.12, 0.181),
        "chain of thought": (0.048, 0.185, 0.054, 0.092, 0.111, 0.022, 0.232, 0.106),
        "IRCoT": (0.224, 0.478, 0.301, 0.133, 0.149, 0.072, 0.224, 0.239),
        "Search-o1": (0.151, 0.443, 0.131, 0.187, 0.176, 0.058, 0.296, 0.206),
        "RAG": (0.349, 0.585, 0.392, 0.299, 0.235, 0.058, 0.208, 0.304),
        "SFT": (0.318, 0.354, 0.121, 0.217, 0.259, 0.066, 0.112, 0.207),
        "R1, base": (0.297, 0.539, 0.202, 0.242, 0.273, 0.083, 0.296, 0.276),
        "R1, instruct": (0.27, 0.537, 0.199, 0.237, 0.292, 0.072, 0.293, 0.271),
        "rejection sampling": (0.36, 0.592, 0.38, 0.331, 0.296, 0.123, 0.355, 0.348),
        "Search-R1, base": (0.48, 0.638, 0.457, 0.433, 0.382, 0.196, 0.432, 0.431),
        "Search-R1, instruct": (0.393, 0.61, 0.397, 0.37, 0.414, 0.146, 0.368, 0.385),
    },
    "3B": {
        "direct": (0.106, 0.288, 0.108, 0.149, 0.244, 0.02, 0.024, 0.134),
        "chain of thought": (0.023, 0.032, 0.005, 0.021, 0.021, 0.002, 0.0, 0.015),
        "IRCoT": (0.111, 0.312, 0.2, 0.164, 0.171, 0.067, 0.24, 0.181),
        "Search-o1": (0.238, 0.472, 0.262, 0.221, 0.218, 0.054, 0.32, 0.255),
        "RAG": (0.348, 0.544, 0.387, 0.255, 0.226, 0.047, 0.08, 0.27),
        "SFT": (0.249, 0.292, 0.104, 0.186, 0.248, 0.044, 0.112, 0.176),
        "R1, base": (0.226, 0.455, 0.173, 0.201, 0.268, 0.055, 0.224, 0.229),
        "R1, instruct": (0.21, 0.449, 0.171, 0.208, 0.275, 0.06, 0.192, 0.224),
        "rejection sampling": (0.294, 0.488, 0.332, 0.24, 0.233, 0.059, 0.21, 0.265),
        "Search-R1, base": (0.406, 0.587, 0.435, 0.284, 0.273, 0.049, 0.088, 0.303),
        "Search-R1, instruct": (0.341, 0.545, 0.378, 0.324, 0.319, 0.103, 0.264, 0.325),
    },
}
"""By model size and method: EM of each set in the order of `SETS`, then the average as printed."""
