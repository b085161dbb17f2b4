output "store" {
  description = "CORAL_STORE of everybody who plans."
  value       = "s3://${module.store.bucket}/coral"
}

output "launch_template" {
  description = "Name of the nodes' launch template, the same in every region."
  value       = local.launch_template
}

output "subnets" {
  description = "Private subnet of each zone, by zone: where nodes start."
  value       = merge([for region in module.region : region.subnet_of_zone]...)
}

output "gateway" {
  description = "Public name to point the certificate's DNS record to."
  value       = module.control.gateway_dns_name
}

output "prefect_tunnel" {
  description = "How to reach the Prefect UI, which is not public."
  value       = "aws ssm start-session --region ${var.home_region} --target ${module.control.instance_id} --document-name AWS-StartPortForwardingSession --parameters portNumber=4200,localPortNumber=4200"
}
