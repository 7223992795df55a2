"""What draws: tables, cards, figures and pages."""
