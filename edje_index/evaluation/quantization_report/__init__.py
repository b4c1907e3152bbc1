"""How far two versions of the same tokens agree: errors of tokens, and changes of the ranking they lead to."""
