"""What a rank shares with the processes beside it: how they are forked, and what they tell each other."""
