"""What distprune offers to other libraries' users; one module per library, none imported here."""
