"""LoRA: policy and critic train an adapter on a frozen base (`lora_rank` of a model's options)."""
