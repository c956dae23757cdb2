"""What carries sentences to the broker and back."""
