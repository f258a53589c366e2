"""What runs in Ray actors: training ranks and rollout replicas."""
