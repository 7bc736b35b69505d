"""What sits inside a rank: the session a script uses, its votes, and its part in a move."""
