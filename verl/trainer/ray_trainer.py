"""The trainer under its name in veRL; it lives in `verl.trainer.loop`."""

from verl.trainer.loop import RayPPOTrainer as RayPPOTrainer
