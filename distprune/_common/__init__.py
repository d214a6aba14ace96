"""What every room uses, and what knows of none of them: numbers, names, communication."""
