"""The retrieval service and its client; imports nothing of ours outside itself."""
