"""Advantages, losses and KL estimators as pure functions of jagged tensors.

No configuration, no Ray and no I/O live here. Conventions that hold throughout:

* A batch is flat. A token tensor has shape ``(num_tokens,)``; ``offsets``, int64 of shape
  ``(num_seqs + 1,)``, delimits sequences: sequence ``i`` is ``x[offsets[i]:offsets[i + 1]]``.
* ``policy_mask``, bool of shape ``(num_tokens,)``, is True exactly at tokens that the policy
  sampled; prompt and observation tokens are False.
* Every per-token column is aligned with the token it concerns: ``log_probs[t]`` is the log-prob of
  token ``t`` given its prefix, ``values[t]`` the value of the state before token ``t``,
  ``rewards[t]`` the reward received for token ``t``.
* A sequence without policy tokens is left out: it has no advantage, carries no loss weight and is
  no member of its group.
* The tensors of one call are on one device.
"""
