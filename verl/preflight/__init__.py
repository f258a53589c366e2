"""What must hold before long work starts: the machine, its memory, models, adapters and files."""
