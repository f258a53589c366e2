"""Whether the policy is still healthy: what is read, the rules, and what follows."""
