"""A vLLM worker extension that can drop the weights, as sleep level 2 does on a GPU."""

from verl.rollout.weight_loading import WeightLoading


class Forgetting(WeightLoading):
    """Mixin for vLLM's worker class in place of `WeightLoading`."""

    def forget_weights(self) -> int:
        """Set every parameter to NaN, keep the buffers; return the number of parameters."""
        parameters = list(self.model_runner.get_model().parameters())
        for parameter in parameters:
            parameter.data.fill_(float("nan"))
        return len(parameters)
