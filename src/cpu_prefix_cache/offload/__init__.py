"""What is stored and when, what is loaded when it is worth it, and every copy on its way."""
