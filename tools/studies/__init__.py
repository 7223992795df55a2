"""The studies of what each part of SoME is worth: a plan, a runner, and pages made from the records."""
