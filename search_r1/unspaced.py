"""The scripts that write words without spaces between them, as a class of a regular expression."""

import re

NEVER_SPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Tibetan, Burmese, Khmer, kana and Chinese characters."""
RANGES = NEVER_SPACED + "\uac00-\ud7af"
"""The same and Korean, which has spaces, but particles at its words."""
UNSPACED = re.compile(f"[{RANGES}]")
