"""What a job reports while it runs, and how it is displayed."""
