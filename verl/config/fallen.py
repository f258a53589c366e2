"""Values of options that fell: what they were, since when they are gone, and what to use.

Options that fell as a whole are in `legacy.yaml`.
"""

from collections.abc import Mapping

FALLEN_VALUES: Mapping[tuple[str, str], str] = {
    ("algorithm.adv_estimator", "remax"): (
        "ReMax is gone since 2026-11-28 (one more rollout per prompt, without a measured gain); "
        "use rloo, whose baseline is the other samples of the prompt"
    ),
    ("trainer.guard.action", "rollback"): (
        "rollbacks are gone since 2026-11-28 (shown by one provoked collapse on one seed); use "
        "stop, which names the last healthy checkpoint, and resume from it with a lower rate"
    ),
    ("trainer.compute_dtype", "float16"): (
        "training in float16 is gone since 2026-11-29 (its loss scale was never run on a card); "
        "use auto, which is bfloat16 from Ampere on and float32 before; engines may still compute "
        "in float16 (actor_rollout_ref.rollout.dtype=float16)"
    ),
}
"""Advice by dotted key and former value."""
