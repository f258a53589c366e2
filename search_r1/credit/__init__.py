"""`search-r1 credit`: what each document that a search brought was worth to the answer."""
