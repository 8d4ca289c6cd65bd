"""What a target model must offer (`base`) and the engines that offer it."""
