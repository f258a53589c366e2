"""Advantages, losses and KL estimators as pure functions of jagged tensors.

There is no configuration, Ray or I/O here. Conventions:

* A batch is flat. A token tensor has shape ``(num_tokens,)``; ``offsets``, int64 of shape
  ``(num_seqs + 1,)``, delimits sequences: sequence ``i`` is ``x[offsets[i]:offsets[i + 1]]``.
* ``policy_mask``, bool of shape ``(num_tokens,)``, is True exactly at tokens that the policy
  sampled; prompt and observation tokens are False.
* Every per-token column is aligned with the token it concerns: ``log_probs[t]`` is the log-prob of
  token ``t`` given its prefix, ``values[t]`` the value of the state before token ``t``,
  ``rewards[t]`` the reward received for token ``t``.
* A sequence without policy tokens is ignored: it has no advantage, no loss weight, and does not
  count in its group.
* The tensors of one call are on one device.
"""
