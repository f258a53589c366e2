"""What a run left in its folder: configuration, recorded dialogues, texts of their tokens."""
