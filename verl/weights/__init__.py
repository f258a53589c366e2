"""How new weights get from the training ranks to the engines (`Transport`)."""
