"""Training ranks: sharded models, actor and critic, LoRA, checkpoint shards, weight transfer."""
