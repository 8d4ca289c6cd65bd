"""The doctor: what is wrong with a drafter or its pairing, from files first and from acceptance last."""
