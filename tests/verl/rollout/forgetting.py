"""A vLLM worker whose weights can be lost, as in the deepest sleep on a GPU."""

from verl.rollout.weight_loading import WeightLoading


class Forgetting(WeightLoading):
    """Mixed into vLLM's worker class in place of `WeightLoading`."""

    def forget_weights(self) -> int:
        """Make every parameter NaN and leave the buffers; returns how many parameters there are."""
        parameters = list(self.model_runner.get_model().parameters())
        for parameter in parameters:
            parameter.data.fill_(float("nan"))
        return len(parameters)
