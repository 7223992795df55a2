"""Text that models here learn from, and how it is prepared."""
